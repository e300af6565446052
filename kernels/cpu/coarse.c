/* The best units by Quest's bounds, found through an 8-bit copy of the bounds that is read first.

   Each channel of a block of BLOCK units has a scale and a zero, so a code is off by at most half a step and a score
   by at most the sum of |q| times that. From the codes follow an upper and a lower limit of every unit's score. The
   k-th largest lower limit is a score that k units reach, so whoever's upper limit stays below it is out. Few are left
   (about twice k), and these are scored with the true bounds: what is chosen is what a scan of the true bounds chooses. */
#include <float.h>
#include <stdlib.h>
#include "fields.h"
#include "units.h"

#define BLOCK 64
#define AHEAD 8192 /* bytes */

typedef struct {
  Bounds exact;     /* `out` and `q` are not used */
  const char *given; /* choose: the queries [row, group, given_dim] as they are; elements from row to row, head to head */
  int64_t given_dtype, given_dim, given_row, given_head;
  int64_t coded;    /* the first so many units have codes, a multiple of BLOCK; the others are always candidates */
  int64_t code_row, scale_row; /* elements from row to row */
  int64_t stride;              /* 2 * dim, up to a multiple of 64 */
  uint8_t *code;               /* `stride` bytes a unit: the high bound, then the low one; see code_of */
  float *scale, *zero;         /* [row, block, 2 * dim]; a scale of infinity: the block holds what has no code */
  int64_t from, count;         /* build: the first unit to code; choose: units per row */
  float *limits;               /* work space: [row, 2, coded] */
  int32_t *ids;                /* [row, count] */
  int64_t *refined;            /* [row]: how many were scored with the true bounds */
} Coarse;

/* Codes of LANES units stand together, so that each lane scores a unit: of 64 channels, four of each unit, then the
   next four. The address of a unit's channel in its block. */
INLINE int64_t code_of(int64_t stride, int64_t unit, int64_t d) {
  return unit / LANES * LANES * stride + d / 64 * 64 * LANES + d % 64 / 4 * 4 * LANES + unit % LANES * 4 + d % 4;
}

/* Codes of one block. Dead units, whose bounds may hold anything, take no part. */
static void code_block(const Coarse *c, int64_t row, int64_t block) {
  const Bounds *b = &c->exact;
  const int64_t wide = 2 * b->dim, first = block * BLOCK;
  float tile[BLOCK * wide] __attribute__((aligned(64)));
  float *scale = c->scale + row * c->scale_row + block * wide, *zero = c->zero + row * c->scale_row + block * wide;
  uint8_t *code = c->code + row * c->code_row + first * c->stride;
  int64_t unit[BLOCK];
  int count = 0, finite = 1;
  Memo memo;
  memo.from = memo.to = 0;
  memset(tile, 0, sizeof tile);
  memset(code, 0, BLOCK * c->stride);
  for (int64_t u = first; u < first + BLOCK; u++)
    if (b->alive[row * b->alive_row + u]) unit[count++] = u;
  read_tokens(&b->high, &memo, row, unit, count, tile, wide);
  read_tokens(&b->low, &memo, row, unit, count, tile + b->dim, wide);
  for (int64_t d = 0; d < wide; d++) {
    float least = count ? tile[d] : 0, most = least;
    for (int i = 0; i < count; i++) {
      float x = tile[i * wide + d];
      finite &= x - x == 0;
      least = x < least ? x : least;
      most = x > most ? x : most;
    }
    float step = most / 255 - least / 255, per = step > 0 ? 1 / step : 0;
    if (!(per - per == 0)) per = step = 0, finite = 0; /* a step too small to divide by */
    scale[d] = step;
    zero[d] = least;
    for (int i = 0; i < count; i++) {
      float place = (tile[i * wide + d] - least) * per + 0.5f;
      code[code_of(c->stride, unit[i] - first, d)] = place >= 255 ? 255 : place > 0 ? (uint8_t)place : 0;
    }
  }
  if (!finite) scale[0] = INFINITY;
}

int kv_code(const Coarse *c) {
  const int64_t first = c->from / BLOCK, blocks = c->coded / BLOCK - first;
#pragma omp parallel for schedule(static) num_threads(c->exact.threads)
  for (int64_t i = 0; i < c->exact.rows * blocks; i++) code_block(c, i / blocks, first + i % blocks);
  return 0;
}

#if defined(__AVX512VNNI__)
/* Query rows as 15-bit integers, in two planes of 8 bits that the processor multiplies with 64 codes at a time. */
typedef struct { __m512i high, low; } Weight; /* of 64 channels */

INLINE float weight_line(const float *w, float peak, Weight *to) {
  const float size = peak > 1e-30f ? peak / 16000 : 1e-34f; /* so small that 1 / size is finite, and rounds all to 0 */
  const __m512 per = _mm512_set1_ps(1 / size);
  for (int i = 0; i < 64; i += LANES) {
    __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(w + i), per));
    __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(64)), 7);
    __m512i low = _mm512_sub_epi32(x, _mm512_slli_epi32(high, 7));
    _mm_storeu_si128((__m128i *)((char *)&to->high + i), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i *)((char *)&to->low + i), _mm512_cvtepi32_epi8(low));
  }
  return size;
}
/* total[i] = the sums of LANES units for row i of four; `w`: [line, row] */
INLINE void add_up(const uint8_t *code, const Weight *w, int64_t lines, const float *size, vf *total) {
  __m512i high[4], low[4];
  for (int i = 0; i < 4; i++) high[i] = low[i] = _mm512_setzero_si512();
  for (int64_t line = 0; line < lines; line++, w += 4)
    for (int k = 0; k < 16; k++, code += 64) {
      const __m512i x = _mm512_loadu_si512(code);
      __builtin_prefetch(code + AHEAD, 0, 2);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        high[i] = _mm512_dpbusd_epi32(high[i], x, _mm512_set1_epi32(((const int32_t *)&w[i].high)[k]));
        low[i] = _mm512_dpbusd_epi32(low[i], x, _mm512_set1_epi32(((const int32_t *)&w[i].low)[k]));
      }
    }
  for (int i = 0; i < 4; i++) /* as floats: of more than 526 channels a sum of both may be beyond 2^31 */
    total[i] = ((vf)_mm512_cvtepi32_ps(high[i]) * 128 + (vf)_mm512_cvtepi32_ps(low[i])) * size[i];
}
#else
typedef struct { float part[64]; } Weight;

INLINE float weight_line(const float *w, float peak, Weight *to) {
  (void)peak;
  memcpy(to->part, w, sizeof to->part);
  return 0; /* exact */
}
INLINE void add_up(const uint8_t *code, const Weight *w, int64_t lines, const float *size, vf *total) {
  (void)size;
  for (int i = 0; i < 4; i++) total[i] = splat(0);
  for (int64_t line = 0; line < lines; line++, w += 4)
    for (int k = 0; k < 16; k++, code += 4 * LANES) {
      __builtin_prefetch(code + AHEAD, 0, 2);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const vf x = __builtin_convertvector((vi)(*(const vu *)code >> (8 * j)) & 255, vf);
        for (int i = 0; i < 4; i++) total[i] += x * w[i].part[4 * k + j];
      }
    }
}
#endif

/* Query rows against one block: weights of the codes, their size, what to add, and how far off the result can be.
   The second term of the error covers the rounding of these sums and of the true ones, the last that of the weights. */
static void weights(const Coarse *c, int64_t row, int64_t block, Weight *w, float *size, float *add, float *off) {
  const Bounds *b = &c->exact;
  const int64_t wide = 2 * b->dim, lines = c->stride / 64;
  const float *q = b->q + row * b->padded * wide;
  const float *scale = c->scale + row * c->scale_row + block * wide, *zero = c->zero + row * c->scale_row + block * wide;
  float x[c->stride];
  memset(x, 0, sizeof x);
  for (int64_t n = 0; n < b->padded; n++) {
    vf sum_add = {0}, sum_off = {0}, high = {0};
    for (int64_t d = 0; d < wide; d += LANES) {
      vf y = load(q + n * wide + d), s = load(scale + d), z = load(zero + d), far = z + s * 255, w0 = y * s;
      vf big = larger(y, -y);
      store(x + d, w0);
      high = larger(high, big * s);
      sum_add += y * z;
      sum_off += big * (0.501f * s + 1e-5f * (larger(z, -z) + larger(far, -far)));
    }
    const float most = peak(high);
    for (int64_t i = 0; i < lines; i++) size[n] = weight_line(x + 64 * i, most, w + (n / 4 * lines + i) * 4 + n % 4);
    add[n] = sum(sum_add);
    off[n] = sum(sum_off) + (most > 0 ? size[n] * 0.51f * 255 * wide : 0) + 1e-30f;
  }
}

/* Limits of a block's scores. */
static void scan(const Coarse *c, int64_t row, int64_t block, float *upper, float *lower) {
  const Bounds *b = &c->exact;
  const int64_t first = block * BLOCK, lines = c->stride / 64;
  const uint8_t *code = c->code + row * c->code_row + first * c->stride;
  const uint8_t *alive = b->alive + row * b->alive_row + first;
  const int wild = c->scale[row * c->scale_row + block * 2 * b->dim] == INFINITY;
  Weight w[b->padded * lines] __attribute__((aligned(64)));
  float size[b->padded], add[b->padded], off[b->padded];
  if (!wild) weights(c, row, block, w, size, add, off);
  for (int64_t u = 0; u < BLOCK && !wild; u += LANES) {
    vf high = splat(-INFINITY), least = high, mean = {0}, slack = {0}, total[4];
    for (int64_t n = 0; n < b->padded; n += 4) {
      add_up(code + u * c->stride, w + n * lines, lines, size + n, total);
      for (int i = 0; i < 4 && n + i < b->group; i++) {
        const vf value = total[i] + add[n + i];
        high = larger(high, value + off[n + i]);
        least = larger(least, value - off[n + i]);
        mean += value;
        slack += off[n + i];
      }
    }
    if (b->mean) {
      high = (mean + slack) / (float)b->group;
      least = (mean - slack) / (float)b->group;
    }
    store(upper + u, high);
    store(lower + u, least);
  }
  for (int64_t u = 0; u < BLOCK; u++)
    if (!alive[u]) upper[u] = lower[u] = -INFINITY;
    else if (wild) upper[u] = INFINITY, lower[u] = -INFINITY;
}

/* From the limits of a row's scores to its best units. Returns 0, or 1 without memory. */
static int decide(const Coarse *c, int64_t row, const float *upper, const float *lower) {
  const Bounds *b = &c->exact;
  const int64_t wide = 2 * b->dim, units = b->units;
  const uint8_t *alive = b->alive + row * b->alive_row;
  const float enough = c->coded >= c->count ? about_kth(lower, c->coded, c->count) : -INFINITY;
  const float cut = enough > -FLT_MAX ? enough : -FLT_MAX; /* -inf: dead */
  int64_t n = 0, chosen = 0;
  int32_t *ids = c->ids + row * c->count;
  uint64_t *rank = malloc(sizeof(uint64_t) * 3 * (units + 1));
  if (!rank) return 1;
  int64_t *place = (int64_t *)(rank + 2 * (units + 1));
  for (int64_t u = 0; u < c->coded; u++) {
    place[n] = u;
    n += upper[u] >= cut;
  }
  for (int64_t u = c->coded; u < units; u++) {
    place[n] = u;
    n += alive[u] != 0;
  }
  c->refined[row] = n;
  float tile[STEP * wide] __attribute__((aligned(64))), score[STEP];
  Memo memo;
  memo.from = memo.to = 0;
  memset(tile, 0, sizeof tile);
  fetch_tokens(&b->high, row, place, n < STEP ? n : STEP);
  fetch_tokens(&b->low, row, place, n < STEP ? n : STEP);
  for (int64_t i = 0; i < n; i += STEP) {
    int count = n - i < STEP ? n - i : STEP, next = n - i - count < STEP ? n - i - count : STEP;
    fetch_tokens(&b->high, row, place + i + count, next);
    fetch_tokens(&b->low, row, place + i + count, next);
    score_units(b, row, place + i, count, tile, &memo, score, NULL);
    for (int j = 0; j < count; j++) rank[i + j] = rank_of(score[j], place[i + j], units);
  }
  uint64_t *sorted = rank + n, least = 0;
  memcpy(sorted, rank, sizeof *rank * n);
  if (n > c->count) least = kth_rank(sorted, n, c->count);
  const uint64_t nothing = rank_of(-INFINITY, 0, units); /* no unit's score of -inf is above it */
  for (int64_t i = 0; i < n && chosen < c->count; i++)
    if (rank[i] >= least && rank[i] > nothing) ids[chosen++] = (int32_t)place[i];
  for (; chosen < c->count; chosen++) ids[chosen] = -1;
  free(rank);
  return 0;
}

/* Returns 0, or 1 without memory. */
int kv_coarse_top(const Coarse *asked) {
  Coarse mine = *asked;
  const Coarse *c = &mine;
  Bounds *b = &mine.exact;
  const int64_t rows = b->rows, coded = c->coded, blocks = coded / BLOCK, tasks = blocks ? blocks : 1;
  const int64_t queries = rows * b->padded * 2 * b->dim;
  if (!c->count || !rows) return 0;
  float *q = aligned_alloc(64, (sizeof(float) * queries + sizeof(int) * rows + 63) / 64 * 64);
  if (!q) return 1;
  int *left = (int *)(q + queries), failed = 0;
  kv_queries(c->given, c->given_dtype, rows, b->group, c->given_row, c->given_head, c->given_dim, b->padded, b->dim, 1, 1, q);
  b->q = q;
  for (int64_t row = 0; row < rows; row++) left[row] = tasks;
#pragma omp parallel for schedule(dynamic, 8) num_threads(b->threads) reduction(| : failed)
  for (int64_t i = 0; i < rows * tasks; i++) {
    int64_t row = i / tasks, first = i % tasks * BLOCK;
    float *upper = c->limits + row * 2 * coded, *lower = upper + coded;
    if (blocks) scan(c, row, i % tasks, upper + first, lower + first);
    if (__atomic_sub_fetch(&left[row], 1, __ATOMIC_ACQ_REL) == 0) failed |= decide(c, row, upper, lower);
  }
  free(q);
  return failed;
}
