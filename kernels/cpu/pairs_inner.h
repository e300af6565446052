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

/* Eight words of 16 tokens, a token to a lane. */
INLINE void turn_both(const uint8_t *const *at, int64_t from, Words out[8]) {
  Words z[8], a[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const int token = i / 4 * 8 + i % 4;
    z[i] = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(at[token] + from)));
    z[i] = _mm512_inserti64x4(z[i], _mm256_loadu_si256((const __m256i *)(at[token + 4] + from)), 1);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const Words first = _mm512_unpacklo_epi32(z[i], z[i + 1]), second = _mm512_unpackhi_epi32(z[i], z[i + 1]);
    const Words third = _mm512_unpacklo_epi32(z[i + 2], z[i + 3]), fourth = _mm512_unpackhi_epi32(z[i + 2], z[i + 3]);
    a[i] = _mm512_unpacklo_epi64(first, third), a[i + 1] = _mm512_unpackhi_epi64(first, third);
    a[i + 2] = _mm512_unpacklo_epi64(second, fourth), a[i + 3] = _mm512_unpackhi_epi64(second, fourth);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    out[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    out[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
  }
}

/* Lane i becomes what JOIN makes of those lanes that are of group i % groups. */
#define OVER_GROUPS(name, JOIN)                                          \
  INLINE vf name(vf x, int64_t groups) {                                 \
    __m512 y = (__m512)x;                                                \
    if (groups <= 8) y = JOIN(y, _mm512_shuffle_f32x4(y, y, 0x4e));      \
    if (groups <= 4) y = JOIN(y, _mm512_shuffle_f32x4(y, y, 0xb1));      \
    if (groups <= 2) y = JOIN(y, _mm512_permute_ps(y, 0x4e));            \
    if (groups <= 1) y = JOIN(y, _mm512_permute_ps(y, 0xb1));            \
    return (vf)y;                                                        \
  }
OVER_GROUPS(sum_of_groups, _mm512_add_ps)
OVER_GROUPS(largest_of_groups, _mm512_max_ps)

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

/* out[i] is the sum of x[i]. */
INLINE void sums_of_four(const vf x[4], float *out) {
  const vf a = EVEN_1(x[0], x[1]) + ODD_1(x[0], x[1]), b = EVEN_1(x[2], x[3]) + ODD_1(x[2], x[3]);
  vf c = EVEN_2(a, b) + ODD_2(a, b); /* of each quarter of the lanes */
  c += ODD_8(c, c);
  c += ODD_4(c, c);
  memcpy(out, &c, 4 * sizeof *out);
}

/* 32 numbers, those at these places */
INLINE void in_order(const void *p, int64_t start, int64_t dtype, const uint16_t *order, vf out[2]) {
  const Words places = _mm512_loadu_si512(order);
  const Words first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(places));
  const Words second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(places, 1));
  if (dtype == F32) {
    const __m512 a = (__m512)numbers(p, start, F32), b = (__m512)numbers(p, start + LANES, F32);
    out[0] = (vf)_mm512_permutex2var_ps(a, first, b);
    out[1] = (vf)_mm512_permutex2var_ps(a, second, b);
    return;
  }
  const Words x = _mm512_loadu_si512((const uint16_t *)p + start);
  if (dtype == BF16) { /* each becomes the upper half of a word */
    out[0] = (vf)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_slli_epi32(first, 16), x);
    out[1] = (vf)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_slli_epi32(second, 16), x);
  } else {
    const Words y = _mm512_permutexvar_epi16(places, x);
    out[0] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(y));
    out[1] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(y, 1));
  }
}

/* So many numbers again and again, as often as there is room. */
INLINE vf repeated(const float *p, int many) {
  switch (many) {
    case 1: return splat(*p);
    case 2: return (vf)_mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)p));
    case 4: return (vf)_mm512_broadcast_f32x4(_mm_loadu_ps(p));
    case 8: return (vf)_mm512_broadcast_f32x8(_mm256_loadu_ps(p));
    default: return load(p);
  }
}

/* How many tokens from number `t` on follow each other. */
INLINE int following(const int64_t *token, int t, int count) {
  const Words lane = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), first = _mm512_set1_epi64(token[t] - t);
  uint64_t same = 0;
  for (int i = 0; i < TILE; i += 8) {
    const Words x = _mm512_sub_epi64(_mm512_loadu_si512(token + i), _mm512_add_epi64(lane, _mm512_set1_epi64(i)));
    same |= (uint64_t)_mm512_cmpeq_epi64_mask(x, first) << i;
  }
  const int run = __builtin_ctzll(~(same >> t));
  return run < count - t ? run : count - t;
}

/* Half words of two tokens, side by side, in this order. */
INLINE Words two_halves(const uint8_t *a, const uint8_t *b, Words order, int whole) {
  if (whole) return _mm512_permutex2var_epi16(_mm512_loadu_si512(a), order, _mm512_loadu_si512(b));
  const Words x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)a));
  return _mm512_permutex2var_epi16(x, order, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)b)));
}

#define WEIGHTS (TILE / 2 * LANES + LANES)

/* What values are multiplied by. */
typedef struct {
  float scale[TILE * LANES], zero[TILE * LANES]; /* lanes of [group, token], see `order` */
  uint32_t weight[4][WEIGHTS] __attribute__((aligned(64))); /* [row][two tokens, group] */
  vf add[4], unit[4]; /* [row]: lane i is of group i % groups; units are those of weights that are whole numbers */
  const uint8_t *at[TILE];                       /* beyond the last token, anywhere */
} Weights;

INLINE int by_bytes(const Field *f) { return BYTES && (f->bits == 8 || refined(f)); } /* as whole numbers */
/* What a byte counts, and which stands for 0. */
INLINE float byte_step(const Field *f) { return f->bits == 8 ? 1 : NIBBLE_STEP; }
INLINE float byte_zero(const Field *f) { return f->bits == 8 ? 0 : NIBBLE_ZERO; }
#define STEPS 128.0f /* of a code from one fraction to the next */
INLINE float middle(int64_t bits) { return 1 + (float)((1 << bits) - 1) / (2 * STEPS); } /* of all fractions */

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
