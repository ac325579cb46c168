/* What the files of libcudart.so.13 share. */
#ifndef SIMCUDA_RUNTIME_H
#define SIMCUDA_RUNTIME_H

#include "core.h"

status sim_said(status result);       /* remember an error for cudaGetLastError */
status sim_entered(const char *call); /* make the context that a call needs, on the thread's current device */

#define ENTER()                                \
    do {                                       \
        status entered = sim_entered(__func__); \
        if (entered != OK) return entered;     \
    } while (0)

#endif
