/* Keys and values that are codes, for queries that were bfloat16, where the processor has AVX2 and neither bfloat16 nor more
   than 256 bits: as whole numbers of 16 bits, of which it multiplies twice as many at once as of floats.

   x = scale * query, or scale * weight, is rounded to whole numbers of a unit, which is such that the largest of a row's (of
   a row's and a group's channels, for values) is 32767; sums stay below 2^31 for 256 channels. Less is lost than if keys and
   values were rounded to bfloat16 after decoding.
   A line is 32 bytes of a token, and field j of all of its half words makes a register:
     keys    a pair is a field of two half words that follow each other
     values  half words of two tokens stand side by side, and a pair is a channel of both
   Nibbles that refine nibbles make bytes with these first, of the even ones and of the odd ones; their channels are those of
   4 bits, four to a half word. */
#include "whole_inner.h"

#if WHOLE
int pairs_fit(const Field *f, int64_t dim, int64_t rows) {
  if (f->dim != dim || rows > CODED_QUERIES) return 0;
  if (f->layout == MIXED) return f->bits == 4 && f->low_bits == 2 && dim % 128 == 0;
  if (f->layout != PER_CHANNEL && f->layout != PER_TOKEN) return 0;
  if ((f->bits != 2 && f->bits != 4 && f->bits != 8) || (f->low && f->bits != 4) || dim * f->bits % 256) return 0;
  const int64_t groups = f->layout == PER_TOKEN ? dim / f->group : 1;
  return f->layout == PER_CHANNEL || (f->group % fields_of(f->bits) == 0 && groups <= LANES && !(groups & (groups - 1)));
}

/* Every number i of `fields` that follow each other, then every number i + 1 ..., of blocks of HALF * fields numbers. */
INLINE void by_field_as(float *x, int64_t count, int fields) {
  for (float *const end = x + count; x < end; x += HALF * fields) {
    vf a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 2 * fields; i++) a[i] = load(x + i * LANES);
#pragma GCC unroll 4
    for (int f = fields; f > 1; f /= 2) { /* the lowest bit of a number's place becomes the highest */
#pragma GCC unroll 8
      for (int i = 0; i < fields; i++) {
        b[i] = PICK(a[2 * i], a[2 * i + 1], 0, 2, 4, 6, 8, 10, 12, 14);
        b[fields + i] = PICK(a[2 * i], a[2 * i + 1], 1, 3, 5, 7, 9, 11, 13, 15);
      }
#pragma GCC unroll 16
      for (int i = 0; i < 2 * fields; i++) a[i] = b[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2 * fields; i++) store(x + i * LANES, a[i]);
  }
}

static void by_field(float *x, int64_t count, int64_t fields) {
  if (fields == 2) by_field_as(x, count, 2);
  else if (fields == 4) by_field_as(x, count, 4);
  else by_field_as(x, count, 8);
}

static void order_queries(int64_t bits, int64_t dim, const float *q, int64_t rows, Queries *x) {
  x->given = q;
  memcpy(x->q, q, sizeof(float) * rows * dim);
  by_field(x->q, rows * dim, fields_of(bits));
}

void pairs_keys(const Field *k, const float *q, int64_t rows, Pairs *x) {
  order_queries(k->bits, k->dim, q, rows, x->keys);
  if (k->layout == MIXED) order_queries(k->low_bits, k->dim, q, rows, x->keys + 1);
  memset(x->from, 0, sizeof x->from);
  memset(x->to, 0, sizeof x->to);
}

/* The queries times the scales of a key group. */
static void take(const Field *k, int64_t bits, int64_t rows, int64_t group, Queries *x) {
  const int64_t dim = k->dim;
  const int bytes = refined(k);
  float scale[256], zero[256];
  widen_run(k->scale, group * dim, dim, k->dtype, scale);
  widen_run(k->zero, group * dim, dim, k->dtype, zero);
  for (int64_t i = 0; i < dim && bytes; i++) scale[i] *= NIBBLE_STEP, zero[i] -= scale[i] * NIBBLE_ZERO;
  by_field(scale, dim, fields_of(bits));
  for (int64_t n = 0; n < rows; n += 4) {
    const float *given = x->given + n * dim, *q = x->q + n * dim;
    vf exact[4] = {{0}}, largest[4] = {{0}};
    for (int64_t d = 0; d < dim; d += LANES)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const vf y = load(q + i * dim + d) * load(scale + d);
        exact[i] += load(given + i * dim + d) * load(zero + d);
        largest[i] = larger(largest[i], magnitude(y));
      }
    const vf4 unit = units_of_four(largest), many = 1 / unit, add = sums_of_four(exact);
    for (int i = 0; i < 8; i++) x->unit[2 * n + i] = unit[i / 2], x->add[2 * n + i] = add[i / 2];
    for (int64_t d = 0; d < dim; d += HALF) {
      const vf first = load(scale + d), second = load(scale + d + LANES);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const float *from = q + i * dim + d;
        _mm256_store_si256((Words *)(x->part + (n + i) * dim + d),
                           whole_numbers(load(from) * first * many[i], load(from + LANES) * second * many[i]));
      }
    }
  }
}

/* scores[n][t] = q[n] . key[t] of `count` tokens of one key group, two at a time. `low`: how far behind a token's codes is what
   refines them. */
INLINE void products_as(const Queries *x, int64_t rows, int64_t dim, const uint8_t *data, int64_t low, const int64_t *token,
                        int count, float *scores, int bits, int fine) {
  const int fields = 16 / bits;
  const int64_t size = dim * bits / 8;
  for (int t = 0; t < count; t += 2, token += 2, scores += 2) {
    const int more = t + 1 < count;
    const uint8_t *const at[2] = {data + token[0] * size, data + token[more] * size};
    for (int64_t n = 0; n < rows; n += 4) {
      const int16_t *q = x->part + n * dim;
      Words s[4][2];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) s[i / 2][i % 2] = _mm256_setzero_si256();
      for (int64_t byte = 0; byte < size; byte += 32) {
        Words words[2][2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
          words[i][0] = words_at(at[i] + byte);
          if (fine) joined(words[i][0], words_at(at[i] + low + byte), words[i]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < fields; j++, q += HALF) {
          const Words first = codes_in(words[0], j, bits, fine), second = codes_in(words[1], j, bits, fine);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) {
            const Words a = words_at(q + i * dim);
            s[i][0] = added(s[i][0], first, a);
            s[i][1] = added(s[i][1], second, a);
          }
        }
      }
#pragma GCC unroll 2
      for (int i = 0; i < 4; i += 2) {
        const vf4 unit = *(const vf4 *)(x->unit + 2 * (n + i)), add = *(const vf4 *)(x->add + 2 * (n + i));
        const vf4 score = (vf4)_mm_cvtepi32_ps(sums_of_two(s[i], s[i + 1])) * unit + add;
        float *to = scores + (n + i) * TILE;
        if (more) {
          memcpy(to, &score, 8);
          memcpy(to + TILE, (const char *)&score + 8, 8);
        } else to[0] = score[0], to[TILE] = score[2];
      }
    }
  }
}

#define PRODUCTS(name, bits, fine)                                                                                         \
  static void name(const Queries *x, int64_t rows, int64_t dim, const uint8_t *data, int64_t low, const int64_t *token, \
                   int count, float *scores) {                                                                             \
    products_as(x, rows, dim, data, low, token, count, scores, bits, fine);                                                \
  }
PRODUCTS(products_2, 2, 0)
PRODUCTS(products_4, 4, 0)
PRODUCTS(products_8, 8, 0)
PRODUCTS(products_fine, 4, 1)

/* scores[n][t] = q[n] . key[t] of a batch, in runs of one key group */
void pairs_dots(const Field *k, int64_t rows, const Tokens *tokens, Pairs *x, float *scores) {
  const int mixed = k->layout == MIXED, narrow = mixed && tokens->narrow; /* a mixed page has a group of each width */
  const int64_t *token = tokens->token, *index = mixed ? tokens->index : token, group = mixed ? k->page : k->group;
  const int64_t bits = narrow ? k->low_bits : k->bits, low = fine_of(k);
  const uint8_t *data = narrow ? k->low : k->data;
  int64_t *from = x->from + narrow, *end = x->to + narrow;
  for (int t = 0, n; t < tokens->count; t += n) {
    if (token[t] < *from || token[t] >= *end) {
      const int64_t number = token[t] / group;
      take(k, bits, rows, mixed ? 2 * number + narrow : number, x->keys + narrow);
      *from = number * group;
      *end = *from + group;
    }
    for (n = 1; t + n < tokens->count && token[t + n] >= *from && token[t + n] < *end;) n++;
    (refined(k) ? products_fine : bits == 8 ? products_8 : bits == 4 ? products_4 : products_2)(
        x->keys + narrow, rows, k->dim, data, low, index + t, n, scores + t);
  }
}
#endif
