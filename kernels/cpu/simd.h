/* Vectors of LANES floats in the compiler's own notation, so one source serves AVX-512, AVX2 and NEON. */
#ifndef KVENGINE_SIMD_H
#define KVENGINE_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HALVES 1 /* products of pairs of bfloat16 */
#else
#define HALVES 0
#endif

#define LANES 16

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef float vf8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t vi8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t vi4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef float vf4 __attribute__((vector_size(16), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define KEEP(x) __asm__("" : "+v"(x)) /* in its register: the compiler would make it again for every product */
#else
#define KEEP(x)
#endif

INLINE vf splat(float x) { return x + (vf){0}; }
INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf x) { *(vf *)p = x; }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }

INLINE float sum(vf x) {
  union { vf v; vf8 h[2]; } a = {x};
  union { vf8 v; vf4 h[2]; } b = {a.h[0] + a.h[1]};
  vf4 c = b.h[0] + b.h[1];
  return (c[0] + c[2]) + (c[1] + c[3]);
}

INLINE float peak(vf x) {
  union { vf v; vf8 h[2]; } a = {x};
  vi8 m = a.h[0] > a.h[1];
  union { vi8 v; vi4 h[2]; } b = {((vi8)a.h[0] & m) | ((vi8)a.h[1] & ~m)};
  vi4 n = (vf4)b.h[0] > (vf4)b.h[1];
  vf4 c = (vf4)((b.h[0] & n) | (b.h[1] & ~n));
  float x0 = c[0] > c[1] ? c[0] : c[1], x1 = c[2] > c[3] ? c[2] : c[3];
  return x0 > x1 ? x0 : x1;
}

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* Lane i of the result is lane `lanes[i]` of x. */
INLINE vf spread(vf x, vi lanes) {
#ifdef __clang__
  vf out;
  for (int i = 0; i < LANES; i++) out[i] = x[lanes[i]];
  return out;
#else
  return __builtin_shuffle(x, lanes);
#endif
}

/* Lane i of the result is the sum of x[i]: a transposition that adds as it goes. */
INLINE vf sums(const vf *x) {
  vf a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    a[i] = PICK(x[2 * i], x[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           PICK(x[2 * i], x[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    b[i] = PICK(a[2 * i], a[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           PICK(a[2 * i], a[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    c[i] = PICK(b[2 * i], b[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           PICK(b[2 * i], b[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  return PICK(c[0], c[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         PICK(c[0], c[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
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

/* 16 numbers of 16 bits, each in a word. */
INLINE vu words_of(const uint16_t *p) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); /* the compiler makes two halves of it */
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
#elif defined(__F16C__)
  union { vf v; __m256 h[2]; } out;
  out.h[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
  out.h[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)));
  return out.v;
#else
  vf out;
  for (int i = 0; i < LANES; i++) out[i] = f16_value(p[i]);
  return out;
#endif
}

#endif
