/* NVRTC: what it compiles is never run. */
#include "core.h"

API const char *nvrtcGetErrorString(status error) { return error ? "simulated NVRTC: error" : "NVRTC_SUCCESS"; }
API status nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, OK; }
API status nvrtcGetPTXSize(void *program, size_t *size) { return (void)program, *size = 1, OK; }
API status nvrtcGetPTX(void *program, char *text) { return (void)program, *text = 0, OK; }
API status nvrtcGetCUBINSize(void *program, size_t *size) { return (void)program, *size = 1, OK; }
API status nvrtcGetCUBIN(void *program, char *text) { return (void)program, *text = 0, OK; }
API status nvrtcGetProgramLogSize(void *program, size_t *size) { return (void)program, *size = 1, OK; }
API status nvrtcGetProgramLog(void *program, char *text) { return (void)program, *text = 0, OK; }
API status nvrtcGetLoweredName(void *program, const char *name, const char **lowered) {
    return (void)program, *lowered = name, OK;
}
