/* Causal attention of many queries in float32 or bfloat16: the last tokens of a text over all of it, or over spans of it.

   A task is a block of queries of one KV head, all its query heads together. It takes TILE tokens at a time: their keys
   are turned on their side, the scores of EIGHT query rows are made and softened, and their values weighed, while all
   of that is in the nearer caches. Tiles of tokens that no query of a block sees are not touched. Where the processor
   multiplies pairs of bfloat16, products of queries and keys in it are exact, and weights are rounded for theirs with
   values, as by the library's kernel; elsewhere bfloat16 is widened tile by tile. All sums are float32. */
#include <stdlib.h>
#include "matrix.h"
#include "prompt.h"

#define ROWS 128 /* query rows of a task, about */
#define MANY 512 /* the same where a head's keys and values are too many for the nearer caches: each task reads them */
#define NEAR (1 << 20) /* bytes of them that are not */

typedef struct {
  int64_t sequences, share; /* of q; `share` of them read the same keys and values */
  int64_t heads, group, queries, tokens, dim, dim_v, threads;
  int64_t dtype; /* as in call.py: floats, or bfloat16 where `kv_causal_bfloat16` */
  float scale;
  const void *q, *k, *v;
  void *out;
  int64_t q_sequence, q_head, q_token, k_sequence, k_head, k_token, v_sequence, v_head, v_token, out_sequence, out_head,
      out_token;
  const int64_t *spans;    /* [sequence, block, span, 2]: tokens that a block of `queries_per` reads; NULL: all */
  const int32_t *position; /* [sequence of k, token]: negative where there is no token; NULL: there are no such */
  const int64_t *first;    /* [sequence of k]: the first token; NULL: nothing is hidden but what comes later */
  int64_t queries_per, spans_per, spans_sequence, position_sequence, sinks, local; /* seen: `sinks` first, `local` last ones */
  const float *logits; /* [sequence, head, query head]: of an attention sink, which has no value; NULL: there is none */
  float softcap;       /* 0: none */
} Causal;

/* Where a query's numbers, or those of its result, begin. */
INLINE int64_t query_at(const Causal *a, int64_t sequence, int64_t head, int64_t i) {
  return sequence * a->q_sequence + head * a->q_head + i * a->q_token;
}

enum { FLOATS, WIDENED, PAIRS }; /* how numbers are read and multiplied: floats; bfloat16 as floats; or by pairs */

/* EIGHT rows side by side, so that `product` reads them in order; pairs one after the other. */
INLINE void lay_query(const Causal *a, const void *from, int64_t n, float *q, int how) {
  const int64_t dim = a->dim;
  float *to = q + n / EIGHT * EIGHT * dim + n % EIGHT;
  if (how == PAIRS && from) memcpy((uint16_t *)q + n * dim, from, sizeof(uint16_t) * dim);
  else if (how == PAIRS) memset((uint16_t *)q + n * dim, 0, sizeof(uint16_t) * dim);
  else
    for (int64_t d = 0; d < dim; d++) to[d * EIGHT] = from ? value_at(from, d, how) * a->scale : 0;
}

/* Queries [first, first + block) of a head's group; `space` as `need` says. */
INLINE void attend_as(const Causal *a, int64_t sequence, int64_t head, int64_t first, int64_t block, float *space,
                      int how) {
  const int64_t dim = a->dim, dim_v = a->dim_v, rows = a->group * block, start = a->tokens - a->queries + first;
  const int64_t count = first + block < a->queries ? block : a->queries - first, last = start + count;
  const int64_t held = sequence / a->share, sinks = a->first ? a->first[held] + a->sinks : 0, local = a->first ? a->local : last;
  const int64_t whole[2] = {0, last}, size = how ? 2 : 4;
  const int64_t *span = a->spans ? a->spans + sequence * a->spans_sequence + first / a->queries_per * a->spans_per * 2 : whole;
  const char *keys = (const char *)a->k + (held * a->k_sequence + head * a->k_head) * size;
  const char *values = (const char *)a->v + (held * a->v_sequence + head * a->v_head) * size;
  float *q = space, *out = q + rows * dim, *key = out + rows * dim_v, *value = key + TILE * dim; /* whole lines, all */
  float *s = value + TILE * dim_v, *total = s + EIGHT * TILE, *top = total + rows * LANES;
  uint16_t weight[EIGHT * TILE];
  int32_t gap[TILE];
  for (int64_t n = 0; n < rows; n++) {
    const int64_t at = query_at(a, sequence, head * a->group + n / block, first + n % block);
    lay_query(a, n % block < count ? (const char *)a->q + at * size : NULL, n, q, how);
    top[n] = -INFINITY;
  }
  memset(out, 0, sizeof(float) * rows * dim_v);
  memset(total, 0, sizeof(float) * rows * LANES);
  for (int64_t n = 0; a->logits && n < rows; n++) {
    top[n] = a->logits[(sequence * a->heads + head) * a->group + n / block];
    total[n * LANES] = top[n] > -INFINITY;
  }
  for (int64_t part = 0; part < (a->spans ? a->spans_per : 1); part++, span += 2) {
    const int64_t end = span[1] < last ? span[1] : last;
    for (int64_t t = span[0]; t < end; t += TILE) {
      const int64_t n = t + TILE < end ? TILE : end - t, columns = (n + PIECE - 1) / PIECE * PIECE;
      if (t >= sinks && t + n <= start - local + 1) continue;
      const int64_t none = a->position ? gaps(a->position + held * a->position_sequence + t, n, gap) : 0;
      if (none == n) continue;
      const float *v = (const float *)(values + t * a->v_token * size);
      int64_t v_token = a->v_token;
      if (how == PAIRS) {
        lay(keys, t * a->k_token / 2, a->k_token / 2, 0, n, dim / 2, key);
        pair_values((const uint16_t *)v, a->v_token, n, none ? gap : NULL, dim_v, value);
      } else lay(keys, t * a->k_token, a->k_token, how, n, dim, key);
      if (how == WIDENED || (how == FLOATS && (n < columns || none))) { /* weights of 0 must not meet what is no token */
        for (int64_t j = 0; j < columns; j++)
          for (int64_t d = 0; d < dim_v; d += LANES)
            store(value + j * dim_v + d, j < n && !(none && gap[j]) ? widened(v, j * v_token + d, how) : splat(0));
        v = value;
        v_token = dim_v;
      }
      for (int64_t m = 0; m < rows; m += EIGHT) {
        const int64_t at = start + m % block - t; /* column of the first of these rows' own token */
        if (at + EIGHT <= 0 || m % block >= count || (t >= sinks && n <= at - local + 1)) continue;
        if (how == PAIRS) pairs_product((const uint16_t *)q + m * dim, EIGHT, key, dim, s);
        else products(q + m * dim, 1, EIGHT, key, TILE, dim, s, TILE, columns, 0);
        for (int i = 0; i < EIGHT; i++) {
          float *mine = s + i * TILE;
          for (int64_t j = 0; how == PAIRS && j < columns; j += LANES) store(mine + j, load(mine + j) * a->scale);
          if (a->softcap > 0) cap(mine, columns, a->softcap);
          hide(mine, at + i + 1 < n ? at + i + 1 : n, columns);
          if (a->first) hide(mine, sinks - t, at + i - local + 1 < n ? at + i - local + 1 : n);
          for (int64_t j = 0; none && j < columns; j += LANES)
            store(mine + j, choose(*(const vi *)(gap + j), splat(-INFINITY), load(mine + j)));
          soften(mine, columns, top + m + i, total + (m + i) * LANES, out + (m + i) * dim_v, dim_v);
        }
        if (how == PAIRS) {
          round_weights(s, weight);
          for (int64_t d = 0; d < dim_v; d += PIECE) add_pairs(weight, value + d, dim_v, n, out + m * dim_v + d, dim_v);
          continue;
        }
        products(s, TILE, 1, v, v_token, columns, out + m * dim_v, dim_v, dim_v, 1);
      }
    }
  }
  for (int64_t n = 0; n < rows; n++) {
    if (n % block >= count) continue;
    const int64_t to = sequence * a->out_sequence + (head * a->group + n / block) * a->out_head +
                       (first + n % block) * a->out_token;
    const float all = sum(load(total + n * LANES)), share = all > 0 ? 1 / all : 0;
    for (int64_t d = 0; d < dim_v; d += LANES) {
      const vf x = load(out + n * dim_v + d) * share;
      if (how) store_halves((uint16_t *)a->out + to + d, x);
      else store((float *)a->out + to + d, x);
    }
  }
}

static void attend(const Causal *a, int64_t sequence, int64_t head, int64_t first, int64_t block, float *space) {
  attend_as(a, sequence, head, first, block, space, FLOATS);
}

static void attend_halves(const Causal *a, int64_t sequence, int64_t head, int64_t first, int64_t block, float *space) {
  attend_as(a, sequence, head, first, block, space, HALVES ? PAIRS : WIDENED);
}

/* 1 where vectors are wide enough for this to be worth it. */
int kv_causal_wide(void) {
  return LANES >= 8;
}

/* 1 where bfloat16 is known too, and the library has no matrix unit for it. */
int kv_causal_bfloat16(void) {
#ifdef MATRIX_UNIT
  if (matrix_allowed()) return 0;
#endif
  return kv_causal_wide();
}

/* 1 where that is by pairs. */
int kv_causal_halves(void) { return HALVES && kv_causal_bfloat16(); }

/* q [sequence, head * group, query, dim], k [sequence / share, head, token, dim], v, out [sequence, query, head * group, dim_v],
   any strides but the last, which is 1; the queries are those of the last tokens. `dim` and `dim_v` are multiples of MULTIPLE;
   of bfloat16 of 32, and the strides of k are even.
   Spans of a block do not overlap, and a block of queries is a multiple of EIGHT. Returns 0, or 1 if memory for the
   buffers cannot be had. */
int kv_causal(const Causal *a) {
  const int64_t most = a->tokens * (a->dim + a->dim_v) * 4 > NEAR ? MANY : ROWS;
  int64_t block = EIGHT;
  while (2 * block * a->group <= most && !(a->spans && a->queries_per % (2 * block))) block *= 2;
  const int64_t blocks = (a->queries + block - 1) / block, heads = a->sequences * a->heads, rows = a->group * block;
  const int64_t need = rows * (a->dim + a->dim_v + LANES + 1) + TILE * (a->dim + a->dim_v) + EIGHT * TILE;
  int failed = 0;
#pragma omp parallel num_threads(a->threads)
  {
    float *space = aligned_alloc(64, sizeof(float) * ((need + 15) & -16));
    if (!space) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < blocks * heads; i++) /* the longest first */
      if (space)
        (a->dtype ? attend_halves : attend)(a, i % heads / a->heads, i % heads % a->heads,
                                            (blocks - 1 - i / heads) * block, block, space);
    free(space);
  }
  return failed;
}
