/* Shared by rans.c and sections.c. reference.py explains the format and is the oracle: every function here gives the
   same bytes and the same numbers. */

#ifndef KV_CODER_H
#define KV_CODER_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define ROWS_AT_ONCE
#endif

#define LANES 16
#define BITS 12
#define TOTAL 4096
#define ESCAPE 255
#define WIDTHS 31
#define CONSTANT 62
#define SUM_SCALE 1024
#define LIMIT 16000

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    uint32_t state[LANES];
    const uint16_t *next, *end;
} reader;

/* Codes of one channel; 0, or -1 if words run out. */
int read_channel(reader *from, const uint32_t *slot, int64_t tokens, uint8_t *out);
/* 0 if all words are used and the states are the encoder's first ones, else -1. */
int read_done(const reader *from);
void difference(const int16_t *q, int64_t tokens, int64_t group, int mode, int16_t *d);
void undo(int16_t *v, int64_t tokens, int64_t group, int mode);
/* Mode and class of one channel, its codes and escapes (`*escaped` counts on); `scratch` holds 5 bytes per token. */
uint8_t choose_channel(const int16_t *q, int64_t tokens, int64_t group, int modes, const int32_t *cost,
                       const int64_t *threshold, const int16_t *radius, uint8_t *codes, int16_t *escapes,
                       int64_t *escaped, int16_t *scratch);

#endif
