/* The arithmetic of NCCL's reductions. */
#include "nccl.h"

#include <string.h>

const size_t sim_type_bytes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

static float of_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_bfloat16(float value) { /* to the nearest, ties to even */
    uint32_t wide;
    memcpy(&wide, &value, 4);
    if (value != value) return 0x7fc0;
    return (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

static float of_float16(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
}

static uint16_t to_float16(float value) {
    _Float16 rounded = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &rounded, 2);
    return bits;
}

float sim_number(const void *element, int type) {
    double wide;
    float value;
    uint16_t half;
    if (type == FLOAT64) return memcpy(&wide, element, 8), (float)wide;
    if (type == FLOAT32) return memcpy(&value, element, 4), value;
    memcpy(&half, element, 2);
    return type == BFLOAT16 ? of_bfloat16(half) : of_float16(half);
}

#define SAME(value) (value)
#define REDUCE_AS(STORED, WIDE, FROM, TO, PREMULTIPLIED)                                    \
    for (size_t i = 0; i < count; i++) {                                                    \
        WIDE total = 0;                                                                     \
        for (int rank = 0; rank < size; rank++) {                                           \
            WIDE value = FROM(((const STORED *)values[rank])[i]);                           \
            if (PREMULTIPLIED) value = FROM(TO((WIDE)(value * factor)));                    \
            if (rank == 0) total = value;                                                   \
            else if (op == PROD) total = (WIDE)(total * value);                             \
            else if (op == MAX) total = value > total ? value : total;                      \
            else if (op == MIN) total = value < total ? value : total;                      \
            else total = (WIDE)(total + value);                                             \
        }                                                                                   \
        if (op == AVG && !(PREMULTIPLIED)) total = (WIDE)(total / (WIDE)size);              \
        ((STORED *)target)[i] = TO(total);                                                  \
    }

void sim_reduce(void *target, char *const *values, int size, size_t count, int type, int op, float factor) {
    /* NCCL multiplies floats before it adds them, also for an average, and divides integers afterwards */
    int scaled = op == AVG || op >= FIRST_PREMULTIPLIER;
    if (op == AVG) factor = 1.0f / (float)size;
    switch (type) {
    case INT8: REDUCE_AS(int8_t, int8_t, SAME, SAME, 0) break;
    case UINT8: REDUCE_AS(uint8_t, uint8_t, SAME, SAME, 0) break;
    case INT32: REDUCE_AS(int32_t, int32_t, SAME, SAME, 0) break;
    case UINT32: REDUCE_AS(uint32_t, uint32_t, SAME, SAME, 0) break;
    case INT64: REDUCE_AS(int64_t, int64_t, SAME, SAME, 0) break;
    case UINT64: REDUCE_AS(uint64_t, uint64_t, SAME, SAME, 0) break;
    case FLOAT16: REDUCE_AS(uint16_t, float, of_float16, to_float16, scaled) break;
    case FLOAT32: REDUCE_AS(float, float, SAME, SAME, scaled) break;
    case FLOAT64: REDUCE_AS(double, double, SAME, SAME, scaled) break;
    case BFLOAT16: REDUCE_AS(uint16_t, float, of_bfloat16, to_bfloat16, scaled) break;
    }
}
