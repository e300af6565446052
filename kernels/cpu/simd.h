/* Vectors of LANES floats in the compiler's own notation: as wide as the processor's registers, so one source serves AVX-512,
   AVX2 and NEON. (Wider ones work, but gcc keeps them in memory.) */
#ifndef KVENGINE_SIMD_H
#define KVENGINE_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__) || defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HALVES 1 /* products of pairs of bfloat16 */
#else
#define HALVES 0
#endif

#if defined(LANES) /* by a test */
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__AVX2__) && LANES == 8
#define WHOLE 1 /* products of pairs of whole numbers, where there are none of bfloat16 */
#else
#define WHOLE 0
#endif

#if defined(__aarch64__) && LANES == 4
#define NEON 1
#else
#define NEON 0
#endif

/* Of a product of four rows, how many columns' sums there are registers for: AVX2 has 16 of them, the others 32. */
#define ACROSS (LANES == 8 ? 2 : 4)
#define AT_ONCE (4 * ACROSS) /* a multiple of LANES */

#define MULTIPLE 16 /* of which widths are, see call.py: whole registers of any processor */

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float vf4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef float va __attribute__((vector_size(4 * ACROSS), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) || (defined(__AVX2__) && LANES == 8)
#define KEEP(x) __asm__("" : "+v"(x)) /* in its register: the compiler would make it again for every product */
#else
#define KEEP(x)
#endif

#if LANES == 16
#define EACH_LANE {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif LANES == 8
#define EACH_LANE {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define EACH_LANE {0, 1, 2, 3}
#endif

INLINE vf splat(float x) { return x + (vf){0}; }
INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf x) { *(vf *)p = x; }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
#if LANES == 8
INLINE vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); } /* b where one is no number, as below */
#else
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
#endif

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* Of two vectors, pieces of `n` lanes: the even ones of each, a's first, or the odd ones. For n = 1 in turns: a's, b's ... */
#if LANES == 16
#define EVEN_1(a, b) PICK(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define ODD_1(a, b) PICK(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#define EVEN_2(a, b) PICK(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define ODD_2(a, b) PICK(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN_4(a, b) PICK(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define ODD_4(a, b) PICK(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define EVEN_8(a, b) PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define ODD_8(a, b) PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#elif LANES == 8
#define EVEN_1(a, b) PICK(a, b, 0, 8, 2, 10, 4, 12, 6, 14)
#define ODD_1(a, b) PICK(a, b, 1, 9, 3, 11, 5, 13, 7, 15)
#define EVEN_2(a, b) PICK(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define ODD_2(a, b) PICK(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define EVEN_4(a, b) PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define ODD_4(a, b) PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#else
#define EVEN_1(a, b) PICK(a, b, 0, 4, 2, 6)
#define ODD_1(a, b) PICK(a, b, 1, 5, 3, 7)
#define EVEN_2(a, b) PICK(a, b, 0, 1, 4, 5)
#define ODD_2(a, b) PICK(a, b, 2, 3, 6, 7)
#endif

#if NEON
INLINE uint8x16_t bytes_at_lanes(vu lanes) { return (uint8x16_t)(lanes * 0x04040404u + 0x03020100u); }
#endif

/* Lane i of the result is lane `lanes[i]` of x. */
INLINE vf spread(vf x, vi lanes) {
#if NEON /* both compilers would go through memory */
  return (vf)vqtbl1q_u8((uint8x16_t)x, bytes_at_lanes((vu)lanes));
#elif defined(__clang__)
  vf out;
  for (int i = 0; i < LANES; i++) out[i] = x[lanes[i]];
  return out;
#else
  return __builtin_shuffle(x, lanes);
#endif
}

/* Lane i of the result is the sum of x[i]: a transposition that adds as it goes. */
INLINE vf sums(const vf *x) {
  vf a[LANES / 2], b[LANES / 4];
#pragma GCC unroll 8
  for (int i = 0; i < LANES / 2; i++) a[i] = EVEN_1(x[2 * i], x[2 * i + 1]) + ODD_1(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < LANES / 4; i++) b[i] = EVEN_2(a[2 * i], a[2 * i + 1]) + ODD_2(a[2 * i], a[2 * i + 1]);
#if LANES == 16
  vf c[2];
  for (int i = 0; i < 2; i++) c[i] = EVEN_4(b[2 * i], b[2 * i + 1]) + ODD_4(b[2 * i], b[2 * i + 1]);
  return EVEN_8(c[0], c[1]) + ODD_8(c[0], c[1]);
#elif LANES == 8
  return EVEN_4(b[0], b[1]) + ODD_4(b[0], b[1]);
#else
  return b[0];
#endif
}

/* The sum of lanes, and the largest. */
INLINE float sum(vf x) {
#if LANES == 16
  x += ODD_8(x, x);
#endif
#if LANES >= 8
  x += ODD_4(x, x);
#endif
  x += ODD_2(x, x);
  return x[0] + x[1];
}

INLINE float peak(vf x) {
#if LANES == 16
  x = larger(x, ODD_8(x, x));
#endif
#if LANES >= 8
  x = larger(x, ODD_4(x, x));
#endif
  x = larger(x, ODD_2(x, x));
  return x[0] > x[1] ? x[0] : x[1];
}

/* Of a product of four rows: each one's ACROSS sums. */
typedef union { vf v[AT_ONCE / LANES]; va row[4]; } Totals;

INLINE Totals totals(const vf *x) {
  Totals out;
#pragma GCC unroll 4
  for (int i = 0; i < AT_ONCE / LANES; i++) out.v[i] = sums(x + i * LANES);
  return out;
}

/* e^x for -87 < x < 89, to about 1 unit in the last place. */
INLINE vf exponential_within(vf x) {
  vf shifted = x * 1.44269504f + 12582912.0f; /* the sum's low bits are round(x / ln 2), its bits 0x4b400000 and those */
  vf whole = shifted - 12582912.0f;
  vf r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  vf y = splat(1.0f / 5040);
  y = y * r + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  return y * (vf)(((vi)shifted + (127 - 0x4b400000)) << 23);
}

/* e^x over the range where the result is a normal number; 0 below it. */
INLINE vf exponential(vf x) {
  vf kept = choose(x > 88.0f, splat(88.0f), choose(x > -87.0f, x, splat(-87.0f)));
  return choose(x > -87.0f, exponential_within(kept), splat(0));
}

/* e^x for x <= 0; 0 where that is no normal number. What is no number stays none: a weight of 0 would hide it. */
INLINE vf fading(vf x) { return choose(x <= -87.0f, splat(0), exponential_within(x)); }

/* softcap * tanh(x / softcap) */
INLINE vf capped(vf x, float softcap) {
  return choose(x == x, softcap - (2 * softcap) / (exponential(x * (2 / softcap)) + 1), x);
}

/* Whether any lane of x is above that of y. */
INLINE int any_above(vf x, vf y) {
#if defined(__AVX512F__) && LANES == 16
  return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_GT_OQ) != 0;
#elif defined(__AVX2__) && LANES == 8
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)y, _CMP_GT_OQ)) != 0;
#else
  const vi above = x > y;
  int32_t any = 0;
  for (int i = 0; i < LANES; i++) any |= above[i];
  return any != 0;
#endif
}

/* LANES numbers of 16 bits, each in a word. */
INLINE vu words_of(const uint16_t *p) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); /* the compiler makes two halves of it */
#elif LANES == 8
  return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
  return __builtin_convertvector(*(const vh *)p, vu);
#endif
}

INLINE vf from_bf16(const uint16_t *p) { return (vf)(words_of(p) << 16); }

INLINE float bf16_value(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

INLINE float f16_value(uint16_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x);
#elif defined(__aarch64__)
  __fp16 half;
  memcpy(&half, &x, 2);
  return half;
#else
  uint32_t sign = (uint32_t)(x & 0x8000) << 16, magnitude = x & 0x7fff, bits;
  if (magnitude >= 0x7c00) bits = (magnitude << 13) + 0x70000000; /* infinity, NaN */
  else if (magnitude >= 0x0400) bits = (magnitude << 13) + 0x38000000;
  else { /* subnormal: magnitude * 2^-24 */
    float small = (float)magnitude * 5.9604644775390625e-8f;
    memcpy(&bits, &small, 4);
  }
  bits |= sign;
  float out;
  memcpy(&out, &bits, 4);
  return out;
#endif
}

INLINE vf from_f16(const uint16_t *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif LANES == 8 && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif NEON
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  vf out;
  for (int i = 0; i < LANES; i++) out[i] = f16_value(p[i]);
  return out;
#endif
}

#endif
