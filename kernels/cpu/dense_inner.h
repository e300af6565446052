/* What the ways of dense.h share. */
#ifndef KVENGINE_DENSE_INNER_H
#define KVENGINE_DENSE_INNER_H

#include <stdlib.h>
#include "dense.h"

#if HALVES
#include <immintrin.h>

/* The nearest bfloat16 of `b` above those of `a`, and what they leave. */
INLINE __m512i nearest(__m512 a, __m512 b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }

INLINE void planes_of(__m512 a, __m512 b, __m512i *first, __m512i *second) {
  const __m512i high = nearest(a, b);
  const __m512 low_a = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16);
  const __m512 low_b = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1)), 16);
  *first = high;
  *second = nearest(_mm512_sub_ps(a, low_a), _mm512_sub_ps(b, low_b));
}

INLINE const char *vector(const Field *f, int64_t row, int64_t token) {
  return (const char *)f->data + 2 * (row * f->row_stride + token * f->token_stride);
}

/* Ask for a line of each of the next batch's vectors. */
INLINE void ask(const Field *f, int64_t row, const Tokens *soon, int from, int to, int64_t byte) {
  for (int t = from; t < to && t < soon->count; t++) __builtin_prefetch(vector(f, row, soon->token[t]) + byte, 0, 2);
}

/* Values by pairs. Beyond the last token, its copies, which have no weight. */
INLINE void pairs_of(const Field *v, int64_t row, const Tokens *tokens, const Tokens *soon, int64_t dim, uint16_t *to) {
  const int last = tokens->count - 1;
  for (int t = 0; t < TILE; t += 2, to += 32) {
    const char *a = vector(v, row, tokens->token[t < last ? t : last]);
    const char *b = vector(v, row, tokens->token[t + 1 < last ? t + 1 : last]);
    for (int64_t d = 0; d < dim; d += 32) {
      ask(v, row, soon, t, t + 2, 2 * d);
      const __m512i one = _mm512_loadu_si512(a + 2 * d), other = _mm512_loadu_si512(b + 2 * d);
      _mm512_store_si512(to + d * TILE, _mm512_unpacklo_epi16(one, other));
      _mm512_store_si512(to + d * TILE + 512, _mm512_unpackhi_epi16(one, other));
    }
  }
}

/* Within each 128 bits, a transposition. */
INLINE void turn(const __m512 *x, __m512 *out) {
  const __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
  const __m512 c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
  out[0] = _mm512_shuffle_ps(a, c, 0x44), out[1] = _mm512_shuffle_ps(a, c, 0xee);
  out[2] = _mm512_shuffle_ps(b, d, 0x44), out[3] = _mm512_shuffle_ps(b, d, 0xee);
}

/* Scores [token, row] of four tokens and up to 16 rows, in the order of the rows. */
INLINE void put(const __m512 *found, int64_t rows, float *scores) {
  __m512 z[4];
  turn(found, z);
  for (int i = 0; i < 4; i++) {
    _mm_storeu_ps(scores + i * TILE, _mm512_castps512_ps128(z[i]));
    if (rows > 4) _mm_storeu_ps(scores + (4 + i) * TILE, _mm512_extractf32x4_ps(z[i], 1));
    if (rows > 8) _mm_storeu_ps(scores + (8 + i) * TILE, _mm512_extractf32x4_ps(z[i], 2));
    if (rows > 12) _mm_storeu_ps(scores + (12 + i) * TILE, _mm512_extractf32x4_ps(z[i], 3));
  }
}

/* A result in the order of its channels. */
INLINE void unsort_pairs(const Dense *x, float *out) {
  for (int64_t i = 0; i < x->rows * x->dim_v; i += 32) {
    const __m512 a = _mm512_loadu_ps(x->out + i), b = _mm512_loadu_ps(x->out + i + 16);
    const __m512 low = _mm512_shuffle_f32x4(a, b, 0x44), high = _mm512_shuffle_f32x4(a, b, 0xee);
    _mm512_storeu_ps(out + i, _mm512_shuffle_f32x4(low, low, 0xd8));
    _mm512_storeu_ps(out + i + 16, _mm512_shuffle_f32x4(high, high, 0xd8));
  }
}
#endif

#endif
