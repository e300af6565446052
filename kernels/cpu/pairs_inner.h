/* What the files about pairs of bfloat16 share. */
#ifndef KVENGINE_PAIRS_INNER_H
#define KVENGINE_PAIRS_INNER_H

#include "pairs.h"

#if HALVES
#include <immintrin.h>

typedef __m512i Words;

/* Four words of 16 tokens, a token to a lane. */
INLINE void turn_round(const uint8_t *const *at, int64_t from, Words out[4]) {
  Words z[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
#define QUARTER(j) _mm_loadu_si128((const __m128i *)(at[i + 4 * j] + from))
    z[i] = _mm512_castsi128_si512(QUARTER(0));
    z[i] = _mm512_inserti32x4(z[i], QUARTER(1), 1);
    z[i] = _mm512_inserti32x4(z[i], QUARTER(2), 2);
    z[i] = _mm512_inserti32x4(z[i], QUARTER(3), 3);
#undef QUARTER
  }
  const Words a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
  const Words c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
  out[0] = _mm512_unpacklo_epi64(a, c), out[1] = _mm512_unpackhi_epi64(a, c);
  out[2] = _mm512_unpacklo_epi64(b, d), out[3] = _mm512_unpackhi_epi64(b, d);
}

/* Lane i becomes the sum of those lanes that are of group i % groups. */
INLINE vf over_groups(vf x, int64_t groups) {
  __m512 y = (__m512)x;
  if (groups <= 8) y = _mm512_add_ps(y, _mm512_shuffle_f32x4(y, y, 0x4e));
  if (groups <= 4) y = _mm512_add_ps(y, _mm512_shuffle_f32x4(y, y, 0xb1));
  if (groups <= 2) y = _mm512_add_ps(y, _mm512_permute_ps(y, 0x4e));
  if (groups <= 1) y = _mm512_add_ps(y, _mm512_permute_ps(y, 0xb1));
  return (vf)y;
}

/* The half word of a lane of register `r`: in their order, or as unpacking puts them. */
INLINE int64_t half_of(int64_t r, int64_t lane, int whole) {
  return whole ? r / 2 * 32 + lane / 4 * 8 + r % 2 * 4 + lane % 4 : r * 16 + lane;
}

/* Whether lines are taken whole; the bytes of upper bits, of 3, are in the other order. */
INLINE int lines_are_whole(const Field *f) { return f->bits != 3 && f->dim * f->bits % 512 == 0; }

/* Half words of two tokens, side by side. */
INLINE Words side_by_side(const uint8_t *a, const uint8_t *b, int64_t r, int whole) {
  if (whole) {
    const Words x = _mm512_loadu_si512(a + r / 2 * 64), y = _mm512_loadu_si512(b + r / 2 * 64);
    return r % 2 ? _mm512_unpackhi_epi16(x, y) : _mm512_unpacklo_epi16(x, y);
  }
  const Words x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(a + r * 32)));
  const Words y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(b + r * 32)));
  return _mm512_or_si512(x, _mm512_slli_epi32(y, 16));
}

/* 32 channels by pairs, of half words with so many fields: the first of each, the second of each. */
INLINE void split(const float *p, int fields, vf *even, vf *odd) {
  const __m512 a = (__m512)load(p), b = (__m512)load(p + LANES);
  if (fields == 2) {
    const Words first = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0), second = _mm512_set_epi64(15, 13, 11, 9, 7, 5, 3, 1);
    *even = (vf)_mm512_permutex2var_pd((__m512d)a, first, (__m512d)b);
    *odd = (vf)_mm512_permutex2var_pd((__m512d)a, second, (__m512d)b);
    return;
  }
  *even = (vf)(fields == 4 ? _mm512_shuffle_f32x4(a, b, 0x88) : _mm512_shuffle_f32x4(a, b, 0x44));
  *odd = (vf)(fields == 4 ? _mm512_shuffle_f32x4(a, b, 0xdd) : _mm512_shuffle_f32x4(a, b, 0xee));
}

/* What values are multiplied by. */
typedef struct {
  float scale[TILE * LANES + LANES], zero[TILE * LANES + LANES]; /* [token, group] of fractions */
  uint32_t weight[4][TILE / 2 * LANES + LANES];                  /* [row][two tokens, group] */
  vf add[4];                                                     /* [row]: lane i is of group i % groups */
  float unit[4];                                                 /* [row]: of weights that are whole numbers */
  const uint8_t *at[TILE];                                       /* beyond the last token, anywhere */
} Weights;

INLINE int by_bytes(const Field *f) { return BYTES && (f->bits == 8 || refined(f)); } /* as whole numbers */
/* What a byte counts, and which stands for 0: of two nibbles, a sixteenth of the upper one's step, and half of that. */
INLINE float byte_step(const Field *f) { return f->bits == 8 ? 1 : 1.0f / 16; }
INLINE float byte_zero(const Field *f) { return f->bits == 8 ? 0 : 8; }
INLINE float middle(int64_t bits) { return 1.5f - 0.5f / (float)(1 << bits); } /* of all fractions */

void take_pairs(const Field *k, int64_t bits, int64_t rows, int64_t group, Queries *x);
void pair_products(const Field *k, int64_t bits, const Queries *x, int64_t rows, const uint8_t **at, int n, float *scores);
void pair_sums(const Pairs *known, Weights *x, const Field *v, int64_t groups, const float *p, int64_t rows, int count,
               float *out);
void take_bytes(const Field *k, int64_t rows, int64_t group, Queries *x);
void byte_products(const Field *k, const Queries *x, int64_t rows, const uint8_t *const *at, int wide, float *scores);
void byte_sums(const Pairs *known, Weights *x, const Field *v, int64_t groups, const float *p, int64_t rows, int count,
               float *out);
void pairs_weigh_mixed(const Field *v, const float *p, int64_t rows, const Tokens *tokens, Pairs *x, float *out);
#endif

#endif
