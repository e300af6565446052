/* The matrix unit (AMX): whether the compiler knows it, and the system lets it be used. */
#ifndef KVENGINE_MATRIX_H
#define KVENGINE_MATRIX_H

#if defined(__AMX_BF16__) && defined(__AVX512VBMI2__) && defined(__linux__)
#define MATRIX_UNIT
#include <immintrin.h>

/* What tiles are loaded from is invisible to the compiler: it must have been written before. */
#define WRITTEN() __asm__ volatile("" ::: "memory")

int matrix_allowed(void); /* asked once, as it has to be */
#endif

#endif
