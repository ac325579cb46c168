/* CUPTI: refused, so that the profiler runs without the device. */
#include "core.h"

API status cuptiGetResultString(status error, const char **text) { return (void)error, *text = "simulated CUPTI", OK; }
API status cuptiGetVersion(unsigned *version) { return *version = 130000, OK; }
API status cuptiGetCallbackName(int domain, unsigned id, const char **name) {
    return (void)domain, (void)id, *name = "", OK;
}
API status cuptiSubscribe(void **subscriber, void *callback, void *data) {
    return (void)callback, (void)data, *subscriber = NULL, 1; /* refused: the profiler then runs without the device */
}
