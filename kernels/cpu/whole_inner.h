/* What the files about whole numbers with AVX2 share. */
#ifndef KVENGINE_WHOLE_INNER_H
#define KVENGINE_WHOLE_INNER_H

#include "pairs.h"

#if WHOLE
#define HALF 16 /* half words of a line */

typedef __m256i Words;

INLINE int64_t fields_of(int64_t bits) { return 16 / bits; } /* of half a word */

INLINE Words words_at(const void *p) { return _mm256_loadu_si256((const Words *)p); }

/* The codes of one field of every half word */
INLINE Words field_of(Words words, int j, int bits) {
  if (j) words = _mm256_srli_epi16(words, bits * j);
  return (j + 1) * bits == 16 ? words : _mm256_and_si256(words, _mm256_set1_epi16((short)((1 << bits) - 1)));
}

/* The bytes of even nibbles and of odd ones with what refines them. */
INLINE void joined(Words code, Words fine, Words byte[2]) {
  const Words upper = _mm256_set1_epi8((char)0xf0);
  byte[0] = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(code, 4), upper), _mm256_andnot_si256(upper, fine));
  byte[1] = _mm256_or_si256(_mm256_and_si256(code, upper), _mm256_andnot_si256(upper, _mm256_srli_epi16(fine, 4)));
}

/* Field j of half words, or of the bytes that they make. */
INLINE Words codes_in(const Words words[2], int j, int bits, int fine) {
  return fine ? field_of(words[j % 2], j / 2, 8) : field_of(words[0], j, bits);
}

/* Sixteen floats as whole numbers, in their order */
INLINE Words whole_numbers(vf first, vf second) {
  const Words both = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)first), _mm256_cvtps_epi32((__m256)second));
  return _mm256_permute4x64_epi64(both, 0xd8);
}

/* sum + products. Left to the compiler, it would add products first, for which there are no registers. */
INLINE Words added(Words sum, Words codes, Words factors) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sum, codes, factors);
#else
  const Words products = _mm256_madd_epi16(codes, factors);
  __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
  return sum;
#endif
}

/* The sums of two tokens for one row, and for the next. */
INLINE __m128i sums_of_two(const Words row[2], const Words next[2]) {
  const Words two = _mm256_hadd_epi32(_mm256_hadd_epi32(row[0], row[1]), _mm256_hadd_epi32(next[0], next[1]));
  return _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
}

INLINE vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* Lane i is the sum of x[i]. */
INLINE vf4 sums_of_four(const vf x[4]) {
  const vf a = EVEN_1(x[0], x[1]) + ODD_1(x[0], x[1]), b = EVEN_1(x[2], x[3]) + ODD_1(x[2], x[3]);
  const vf c = EVEN_2(a, b) + ODD_2(a, b);
  return (vf4)_mm_add_ps(_mm256_castps256_ps128((__m256)c), _mm256_extractf128_ps((__m256)c, 1));
}

/* Such that the largest becomes 32767, or nothing is there. */
INLINE vf unit_of(vf largest) { return larger(largest, splat(1e-30f)) / 32767; }

/* Lane i is such that the largest of x[i] becomes 32767, or nothing is there. */
INLINE vf4 units_of_four(const vf x[4]) {
  const vf a = larger(EVEN_1(x[0], x[1]), ODD_1(x[0], x[1])), b = larger(EVEN_1(x[2], x[3]), ODD_1(x[2], x[3]));
  const vf c = larger(EVEN_2(a, b), ODD_2(a, b));
  const __m128 most = _mm_max_ps(_mm256_castps256_ps128((__m256)c), _mm256_extractf128_ps((__m256)c, 1));
  return (vf4)_mm_max_ps(most, _mm_set1_ps(1e-30f)) / 32767;
}

/* How far behind the codes is what refines them. */
INLINE int64_t fine_of(const Field *f) { return refined(f) ? (const uint8_t *)f->low - (const uint8_t *)f->data : 0; }
#endif

#endif
