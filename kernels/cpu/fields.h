/* Stored keys or values, and how a token's vector is read from them as floats. Mirrored in call.py. */
#ifndef KVENGINE_FIELDS_H
#define KVENGINE_FIELDS_H

#include "simd.h"

enum { F32, BF16, F16 };                /* dtypes */
enum { DENSE, PER_CHANNEL, PER_TOKEN, MIXED, LOWRANK, TURNED }; /* layouts, see codecs.py */

typedef struct {
  int64_t layout;
  int64_t dim;
  int64_t dtype;        /* of `data` if DENSE, else of scale, zero and channel */
  int64_t row_stride;   /* elements; DENSE only, 0 for a pool */
  int64_t token_stride; /* elements; DENSE only */
  int64_t bits, low_bits, group, page, salient;
  int64_t per_token; /* MIXED: scales belong to tokens (values) or to channels (keys) */
  const void *data, *low, *scale, *zero, *channel;
  const uint8_t *mask; /* MIXED: a bit per slot of a page, set where the token is salient */
  double factor;       /* LOWRANK, see lowrank.c: on cosine and sine */
  /* TURNED: a scale per token; `zero`: 16 levels, `channel`: the turn [dim, dim], both floats */
} Field;

/* What a reader keeps between tokens: the scale and zero of the last key group, as floats; of a mixed page's, both. */
typedef struct {
  int64_t from, to; /* the tokens they hold for */
  float scale[256 + LANES], zero[256 + LANES], low_scale[256 + LANES], low_zero[256 + LANES];
} Memo;

/* Numbers from element `i` on. */
INLINE vf numbers(const void *p, int64_t i, int64_t dtype) {
  if (dtype == F32) return load((const float *)p + i);
  return dtype == BF16 ? from_bf16((const uint16_t *)p + i) : from_f16((const uint16_t *)p + i);
}

#define BATCH 32 /* tokens of a batch */
#define TILE (WHOLE ? 64 : BATCH) /* or so many, where that is faster: what there is by token has room for these */

/* A batch of tokens; of mixed pages all are of one width, and `index` are their numbers among all tokens of it. */
typedef struct {
  int count, narrow;
  int together; /* as many tokens as a batch takes, which follow each other, of pages that are not mixed */
  int64_t token[TILE], index[TILE];
} Tokens;

void read_turned(const Field *f, int64_t token, float *out);
void read_lowrank(const Field *f, int64_t row, const int64_t *place, int count, float *tile, int64_t stride);
void read_tokens(const Field *f, Memo *memo, int64_t row, const int64_t *token, int count, float *tile, int64_t stride);
void widen_run(const void *p, int64_t start, int64_t n, int64_t dtype, float *out); /* `n` numbers as floats */
void kv_queries(const char *q, int64_t dtype, int64_t rows, int64_t heads, int64_t row_stride, int64_t head_stride,
                int64_t wide, int64_t padded, int64_t dim, int64_t split, float scale, float *out);
void fetch_start(const Field *f, int64_t row, int64_t token, int64_t count);
void fetch_tokens(const Field *f, int64_t row, const int64_t *token, int count);
void fetch_batch(const Field *f, int64_t row, const Tokens *x);

#define PAIRED (2 * LANES)

/* Register `j` of a stored vector from channel `d` on, as floats. Of PAIRED bf16, which fill a register in pairs, the even
   ones come first and then the odd ones: a shift and a mask instead of spreading. `sort`, `unsort` in vectors.h: the other side. */
INLINE vf channels(const char *p, int64_t d, int j, int64_t dtype) {
  if (dtype == F32) return load((const float *)p + d + j * LANES);
  if (dtype == F16) return from_f16((const uint16_t *)p + d + j * LANES);
  vu pairs = *(const vu *)(p + 2 * (d + j / 2 * PAIRED));
  return j & 1 ? (vf)(pairs & 0xffff0000u) : (vf)(pairs << 16);
}

/* How many of a page's slots before this one are salient. */
INLINE int64_t salient_before(const uint8_t *mask, int64_t slot) {
  int64_t count = 0, byte = 0;
  for (; byte + 8 <= slot / 8; byte += 8) {
    uint64_t word;
    memcpy(&word, mask + byte, 8);
    count += __builtin_popcountll(word);
  }
  for (; byte < slot / 8; byte++) count += __builtin_popcount(mask[byte]);
  return slot % 8 ? count + __builtin_popcount(mask[byte] & ((1 << slot % 8) - 1)) : count;
}

#endif
