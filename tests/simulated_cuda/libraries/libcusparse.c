/* cuSPARSE. */
#include "core.h"

API const char *cusparseGetErrorString(status error) { return error ? "simulated cuSPARSE: error" : "success"; }
