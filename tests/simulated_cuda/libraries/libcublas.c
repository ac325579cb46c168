/* cuBLAS: the few functions whose answers matter. build.py makes every other one return zero. */
#include "core.h"

API status cublasGetPointerMode_v2(void *handle, int *mode) { return (void)handle, *mode = 0, OK; }
API status cublasGetMathMode(void *handle, int *mode) { return (void)handle, *mode = 0, OK; }
API status cublasGetVersion_v2(void *handle, int *version) { return (void)handle, *version = 130002, OK; }
API const char *cublasGetStatusString(status error) { return error ? "simulated cuBLAS: error" : "success"; }
