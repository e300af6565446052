/* Whole pages in and out of codes: the ranges of groups, codes within them, and the numbers back as floats. */
#include <stdlib.h>
#include "fields.h"

#define WIDE (256 + LANES)

/* Numbers [batch, token, dim], any strides but the last, which is 1. A group is `group` tokens of a channel if `along`,
   else `group` channels of a token. `dim` is a multiple of MULTIPLE, and so is a group of channels. Mirrored in native.py. */
typedef struct {
  int64_t batch, tokens, dim, group, along, bits, dtype, x_batch, x_token, threads;
  const void *x;
  const uint8_t *alive; /* [batch, token]: 0 where a token does not count; NULL: all do */
  float *low, *high;    /* a group's ends; for codes its zero and its step */
  uint8_t *code;        /* [batch, token, dim * bits / 8] */
} Groups;

INLINE vf smaller(vf a, vf b) { return choose(a < b, a, b); }

static void read_token(const Groups *g, int64_t batch, int64_t token, float *out) {
  widen_run(g->x, batch * g->x_batch + token * g->x_token, g->dim, g->dtype, out);
}

/* Of `group` tokens, or of one token; a group without any is 0 and 0. 0 times a number is added to the low end, so that what is
   not finite makes it NaN, which stays. */
static void range(const Groups *g, int64_t batch, int64_t part, float *low, float *high) {
  float x[WIDE];
  const int64_t each = g->along ? g->group : 1;
  int any = 0;
  for (int64_t token = part * each; token < (part + 1) * each; token++) {
    if (g->alive && !g->alive[batch * g->tokens + token]) continue;
    read_token(g, batch, token, x);
    if (g->along)
      for (int64_t d = 0; d < g->dim; d += LANES) {
        const vf y = load(x + d);
        store(low + d, (any ? smaller(y, load(low + d)) : y) + y * 0);
        store(high + d, any ? larger(y, load(high + d)) : y);
      }
    else
      for (int64_t d = 0; d < g->dim; d += g->group) {
        vf a = load(x + d), b = a, none = a * 0;
        for (int64_t e = LANES; e < g->group; e += LANES) {
          const vf y = load(x + d + e);
          a = smaller(y, a);
          b = larger(y, b);
          none += y * 0;
        }
        low[d / g->group] = sum(none) - peak(-a);
        high[d / g->group] = peak(b);
      }
    any = 1;
  }
  const int64_t count = g->along ? g->dim : g->dim / g->group;
  if (!any)
    for (int64_t i = 0; i < count; i++) low[i] = high[i] = 0;
}

INLINE void pack_as(const uint8_t *restrict code, int64_t bytes, int bits, uint8_t *restrict out) {
  for (int64_t i = 0; i < bytes; i++) {
    unsigned byte = 0;
#pragma GCC unroll 8
    for (int j = 0; j < 8 / bits; j++) byte |= (unsigned)code[i * (8 / bits) + j] << j * bits;
    out[i] = (uint8_t)byte;
  }
}

typedef uint8_t vb __attribute__((vector_size(LANES), aligned(1), may_alias));

static void codes(const Groups *g, int64_t batch, int64_t token, const float *zero, const float *step) {
  const vf top = splat((1 << g->bits) - 1);
  const int64_t bytes = g->dim * g->bits / 8;
  float x[WIDE];
  uint8_t code[WIDE], *out = g->code + (batch * g->tokens + token) * bytes;
  read_token(g, batch, token, x);
  for (int64_t d = 0; d < g->dim; d += LANES) {
    const int64_t i = g->along ? d : d / g->group;
    vf at = (load(x + d) - (g->along ? load(zero + i) : splat(zero[i]))) / (g->along ? load(step + i) : splat(step[i]));
    at = smaller(choose(at > 0, at, splat(0)), top); /* and what is no number becomes 0 */
    vi whole = (vi)(at + 12582912.0f) & 0xff;        /* the sum's low bits are the nearest integer, ties to even */
    *(vb *)(code + d) = __builtin_convertvector(whole, vb);
  }
  switch (g->bits) { /* constants, so that each loop is specialised */
    case 1: pack_as(code, bytes, 1, out); break;
    case 2: pack_as(code, bytes, 2, out); break;
    case 4: pack_as(code, bytes, 4, out); break;
    default: memcpy(out, code, bytes);
  }
}

INLINE int64_t ends(const Groups *g) { return g->along ? g->dim : g->dim / g->group; }

void kv_ranges(const Groups *g) {
  const int64_t parts = g->along ? g->tokens / g->group : g->tokens, n = ends(g);
#pragma omp parallel for schedule(static) num_threads(g->threads)
  for (int64_t i = 0; i < g->batch * parts; i++) range(g, i / parts, i % parts, g->low + i * n, g->high + i * n);
}

void kv_codes(const Groups *g) {
  const int64_t each = g->along ? g->group : 1, parts = g->tokens / each, n = ends(g);
#pragma omp parallel for schedule(static) num_threads(g->threads)
  for (int64_t i = 0; i < g->batch * parts; i++)
    for (int64_t token = i % parts * each; token < (i % parts + 1) * each; token++)
      codes(g, i / parts, token, g->low + i * n, g->high + i * n);
}

/* All tokens of a field's pages, `dim` floats each, a multiple of MULTIPLE. */
void kv_decode(const Field *f, int64_t tokens, float *out, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t first = 0; first < tokens; first += f->page) {
    Memo memo;
    memo.from = memo.to = 0;
    int64_t token[BATCH];
    for (int64_t from = first, to = first + f->page; from < to; from += BATCH) {
      const int count = to - from < BATCH ? to - from : BATCH;
      for (int i = 0; i < count; i++) token[i] = from + i;
      read_tokens(f, &memo, 0, token, count, out + from * f->dim, f->dim);
    }
  }
}
