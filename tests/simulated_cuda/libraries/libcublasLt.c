/* cuBLASLt: one algorithm for every product. */
#include "core.h"

#include <string.h>

API size_t cublasLtGetVersion(void) { return 130002; }
/* One algorithm fits all, and takes no workspace. torch has allocated its own before it asks. */
struct heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
API status cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                          void *preference, int asked, struct heuristic *found, int *number) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    sim_note(__func__);
    memset(found, 0, sizeof *found);
    found->waves = 1;
    *number = asked > 0;
    return OK;
}
