/* cuDNN: one engine for every graph of operations. */
#include "core.h"

#include <stdlib.h>

API size_t cudnnGetVersion(void) { return 92000; }
API size_t cudnnGetCudartVersion(void) { return 13000; }
API const char *cudnnGetErrorString(status error) { return error ? "simulated cuDNN: error" : "CUDNN_STATUS_SUCCESS"; }
API void cudnnGetLastErrorString(char *text, size_t size) { if (size) *text = 0; }
API status cudnnGetProperty(int which, int *value) { return *value = (int[]){9, 20, 0}[which % 3], OK; }
API status cudnnBackendCreateDescriptor(int kind, void **made) {
    sim_note(__func__);
    *made = calloc(1, 64);
    *(int *)*made = kind;
    return OK;
}
API status cudnnBackendDestroyDescriptor(void *made) { return free(made), OK; }
/* One engine for every graph of operations, and a plan of it that takes SIMCUDA_CUDNN_WORKSPACE bytes. What real
 * plans take is known to cuDNN alone. */
API status cudnnBackendGetAttribute(void *descriptor, int attribute, int type, int64_t room, int64_t *number,
                                    void *values) {
    (void)descriptor, (void)type;
    enum { HEURISTIC_RESULTS = 202, CONFIG_ENGINE = 300, CONFIG_SHARED = 304, PLAN_WORKSPACE = 402, ENGINE_INDEX = 1301 };
    const char *text = getenv("SIMCUDA_CUDNN_WORKSPACE");
    int known = attribute == HEURISTIC_RESULTS || attribute == CONFIG_ENGINE || attribute == CONFIG_SHARED ||
                attribute == PLAN_WORKSPACE || attribute == ENGINE_INDEX;
    sim_note(__func__);
    if (number != NULL) *number = known;
    if (room > 0 && values != NULL && attribute == PLAN_WORKSPACE) *(int64_t *)values = text != NULL ? atoll(text) : 0;
    if (room > 0 && values != NULL && attribute == CONFIG_SHARED) *(int32_t *)values = 0;
    if (room > 0 && values != NULL && attribute == ENGINE_INDEX) *(int64_t *)values = 0;
    return OK;
}
/* What a batch norm in training takes beside its tensors is known to cuDNN alone, too. */
API status cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operations, void *x,
                                                                    void *z, void *y, void *scale, void *activation,
                                                                    size_t *size) {
    (void)handle, (void)mode, (void)operations, (void)x, (void)z, (void)y, (void)scale, (void)activation;
    return *size = 0, OK;
}
API status cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations, void *x, void *y,
                                                             void *dy, void *dz, void *dx, void *scale,
                                                             void *activation, size_t *size) {
    (void)handle, (void)mode, (void)operations, (void)x, (void)y, (void)dy, (void)dz, (void)dx, (void)scale;
    (void)activation;
    return *size = 0, OK;
}
API status cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations,
                                                                void *activation, void *x, size_t *size) {
    (void)handle, (void)mode, (void)operations, (void)activation, (void)x;
    return *size = 0, OK;
}
