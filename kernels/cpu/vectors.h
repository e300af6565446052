/* Scores and weighted sums of a batch by vectors of floats, from where the tokens' vectors lie or from a tile. */
#ifndef KVENGINE_VECTORS_H
#define KVENGINE_VECTORS_H

#include "fields.h"

#define TOGETHER(dtype) ((dtype) == BF16 ? 2 : 1) /* registers of channels that are read at once */

static void sort(const float *x, int64_t n, float *out) {
  for (int64_t i = 0; i < n; i++) out[(i & -PAIRED) + (i & 1) * LANES + i % PAIRED / 2] = x[i];
}

static void unsort(float *x, int64_t n) {
  for (int64_t d = 0; d < n; d += PAIRED) {
    float pairs[PAIRED];
    for (int i = 0; i < PAIRED; i++) pairs[i] = x[d + (i & 1) * LANES + i / 2];
    memcpy(x + d, pairs, sizeof pairs);
  }
}

/* Ask for the line that this register begins, if it does, to be read soon. */
INLINE void ask(const char *p, int64_t d, int j, int64_t dtype) {
  const int64_t at = (d + j * LANES) * (dtype == F32 ? 4 : 2);
  if (at % 64 == 0) __builtin_prefetch(p + at, 0, 2);
}

/* scores[n][t] = q[n] . at[t]; four query rows by ACROSS tokens at a time, so that loads serve several products. For each
   line that is read, one of the next batch (`soon`) is asked for: requests in one burst would have to wait for each
   other, and computing for them. */
INLINE void dots_as(const float *q, int64_t rows, const char *const *at, const char *const *soon, int count, int64_t dim,
                    float *scores, int64_t dtype) {
  for (int64_t n = 0; n < rows; n += 4)
    for (int t = 0; t < count; t += ACROSS) {
      const float *a = q + n * dim;
      vf s[AT_ONCE] = {{0}};
      for (int64_t d = 0; d < dim; d += TOGETHER(dtype) * LANES)
        for (int part = 0; part < TOGETHER(dtype); part++) {
          vf k[ACROSS];
#pragma GCC unroll 4
          for (int j = 0; j < ACROSS; j++) {
            if (n == 0 && soon) ask(soon[t + j], d, part, dtype);
            k[j] = channels(at[t + j], d, part, dtype);
            KEEP(k[j]);
          }
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) {
            vf x = load(a + i * dim + d + part * LANES);
#pragma GCC unroll 4
            for (int j = 0; j < ACROSS; j++) s[ACROSS * i + j] += x * k[j];
          }
        }
      const Totals total = totals(s);
      for (int i = 0; i < 4; i++) *(va *)(scores + (n + i) * TILE + t) = total.row[i];
    }
}

/* out[n] += sum_t p[n][t] at[t], for `wide` registers of channels at once: 4 * wide independent sums hide latency */
INLINE void weigh_part(const float *p, const char *const *at, const char *const *soon, int64_t from, int count,
                       int64_t dim, float *out, int wide, int64_t dtype) {
  vf s[4][ACROSS];
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < wide; j++) s[i][j] = load(out + i * dim + j * LANES);
  for (int t = 0; t < count; t++)
    for (int j = 0; j < wide; j++) {
      if (soon) ask(soon[t], from, j, dtype);
      vf x = channels(at[t], from, j, dtype);
      KEEP(x);
      for (int i = 0; i < 4; i++) s[i][j] += x * p[i * TILE + t];
    }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < wide; j++) store(out + i * dim + j * LANES, s[i][j]);
}

INLINE void weigh_as(const float *p, int64_t rows, const char *const *at, const char *const *soon, int count,
                     int64_t dim, float *out, int64_t dtype) {
  for (int64_t n = 0; n < rows; n += 4, soon = NULL) {
    const float *w = p + n * TILE;
    float *to = out + n * dim;
    int64_t d = 0;
    for (; d + ACROSS * LANES <= dim; d += ACROSS * LANES) weigh_part(w, at, soon, d, count, dim, to + d, ACROSS, dtype);
    for (; d + 2 * LANES <= dim; d += 2 * LANES) weigh_part(w, at, soon, d, count, dim, to + d, 2, dtype);
    if (d < dim) weigh_part(w, at, soon, d, count, dim, to + d, 1, dtype);
  }
}

#define SPECIALISE(name)                                                                                            \
  static void name(const float *x, int64_t rows, const char *const *at, const char *const *soon, int count,         \
                   int64_t dim, float *out, int64_t dtype) {                                                        \
    if (dtype == F32) name##_as(x, rows, at, soon, count, dim, out, F32);                                           \
    else if (dtype == BF16) name##_as(x, rows, at, soon, count, dim, out, BF16);                                    \
    else name##_as(x, rows, at, soon, count, dim, out, F16);                                                        \
  }
SPECIALISE(dots)
SPECIALISE(weigh)

#if HALVES
/* Four query rows that were bfloat16, as they were: without the scale that `q` has. */
INLINE void halve(const float *q, float scale, int64_t n, uint16_t *out) {
  for (int64_t i = 0; i < n; i += PAIRED) {
    const vf a = load(q + i) / scale, b = load(q + i + LANES) / scale;
    _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
  }
}

/* `dots` of four rows and keys in bfloat16 by products of pairs, which are exact as well, and need no widening. */
static void dots_halved(const uint16_t *q, float scale, const char *const *at, const char *const *soon, int count,
                        int64_t dim, float *scores) {
  for (int t = 0; t < count; t += ACROSS) {
    __m512 s[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) s[i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += PAIRED) {
      __m512bh k[ACROSS];
#pragma GCC unroll 4
      for (int j = 0; j < ACROSS; j++) {
        __builtin_prefetch(soon[t + j] + 2 * d, 0, 2);
        k[j] = (__m512bh)_mm512_loadu_si512(at[t + j] + 2 * d);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const __m512bh x = (__m512bh)_mm512_loadu_si512(q + i * dim + d);
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++) s[ACROSS * i + j] = _mm512_dpbf16_ps(s[ACROSS * i + j], x, k[j]);
      }
    }
    const Totals total = totals((const vf *)s);
    for (int i = 0; i < 4; i++) *(va *)(scores + i * TILE + t) = total.row[i] * scale;
  }
}
#endif

/* Whether vectors are used as they lie. A half is widened once for all query rows if these are many. */
INLINE int plain(const Field *f, int64_t dim, int64_t padded) {
  return f->layout == DENSE && f->dim == dim && (f->dtype == F32 || (padded == 4 && dim % 32 == 0));
}

/* Where a batch's vectors are. If they are used as they lie, those of the next batch are asked for meanwhile; else
   they are widened into `tile`. */
typedef struct {
  const char *at[TILE], *soon[TILE];
  int64_t dtype; /* of what is there */
} Vectors;

static void locate(const Field *f, Memo *memo, int64_t row, int lies, const int64_t *token, int count, const Tokens *next,
                   int64_t dim, float *tile, Vectors *x) {
  const int64_t size = f->dtype == F32 ? 4 : 2;
  const char *from = (const char *)f->data + row * f->row_stride * size;
  x->dtype = lies ? f->dtype : F32;
  if (!lies) read_tokens(f, memo, row, token, count, tile, dim);
  const int64_t step = f->token_stride * size;
  const int both = next->count < count ? next->count : count;
  if (lies) {
    for (int i = 0; i < count; i++) x->at[i] = from + token[i] * step;
    for (int i = 0; i < both; i++) x->soon[i] = from + next->token[i] * step;
    for (int i = both; i < count; i++) x->soon[i] = x->at[i];
  } else
    for (int i = 0; i < count; i++) x->at[i] = x->soon[i] = (const char *)(tile + i * dim);
  for (int i = count; i % 4; i++) x->at[i] = x->soon[i] = x->at[count - 1]; /* computed with, never seen */
}

#endif
