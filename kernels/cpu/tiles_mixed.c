/* Pages of two widths, 4 bits and 2, by the matrix unit: fractions of either lie in the order of 4 bits.

   Keys of a page have two groups, and so two sets of scaled queries. */
#include "tiles_inner.h"

#ifdef MATRIX_UNIT
/* Fractions of a mixed page's token, whatever its width, in the order of 4 bits. */
typedef struct {
  Line turn, mask;
  __m128i places; /* of the words: those of 2 bits hold two words of 4 */
  __mmask8 there; /* which 8 bytes are its own */
  int64_t step;   /* bytes of 32 channels */
} Width;

/* Of 2 bits, number i is field i % 2 * 4 + i / 8 of the word i % 8 / 2. */
static void widths(Width to[2]) {
  const int64_t each = 0x0000000100000001, odd = 0x0001000000010000;
  to[0] = (Width){turns(4), _mm512_set1_epi16(15 << 3),
                  _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 3, 16};
  to[1] = (Width){_mm512_setr_epi64(5 * each + 13 * odd, 5 * each + 13 * odd, 3 * each + 11 * odd, 3 * each + 11 * odd,
                                    each + 9 * odd, each + 9 * odd, 15 * each + 7 * odd, 15 * each + 7 * odd),
                  _mm512_set1_epi16(3 << 5), _mm_setr_epi8(0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7), 1, 8};
}

INLINE Line mixed_fractions(const uint8_t *p, const Width *w) {
  Line words = _mm512_broadcast_i32x4(_mm_shuffle_epi8(_mm_maskz_loadu_epi64(w->there, p), w->places));
  words = _mm512_shldv_epi16(words, words, w->turn);
  return _mm512_ternarylogic_epi32(words, w->mask, _mm512_set1_epi16(0x3f80), 0xea);
}

typedef struct {
  const uint8_t *data[2];
  int64_t size[2];
  Width of[2];
} Widths;

INLINE Widths widths_of(const Field *f, int64_t dim) {
  Widths x = {.data = {f->data, f->low}, .size = {dim / 2, dim / 4}};
  widths(x.of);
  return x;
}

INLINE const uint8_t *mixed_at(const Widths *x, const Tokens *tokens, int t) {
  return x->data[tokens->narrow] + tokens->index[t] * x->size[tokens->narrow];
}

INLINE void ask_mixed(const Widths *x, const Tokens *soon, int t) {
  if (t >= soon->count) return;
  const uint8_t *at = mixed_at(x, soon, t);
  for (int64_t line = 0; line < x->size[soon->narrow]; line += 64) __builtin_prefetch(at + line, 0, 2);
}

INLINE void mixed_keys_as(const Field *k, const Tokens *tokens, const Tokens *soon, uint16_t *to, int64_t dim) {
  const Widths x = widths_of(k, dim);
  for (int t = 0, count = tokens->count; t < count; t++) {
    const Width w = x.of[tokens->narrow];
    const uint8_t *code = mixed_at(&x, tokens, t);
    ask_mixed(&x, soon, t);
    for (int64_t d = 0; d < dim; d += 32, code += w.step, to += 32) _mm512_store_si512(to, mixed_fractions(code, &w));
  }
}

static void mixed_keys(const Field *k, const Tokens *tokens, const Tokens *soon, uint16_t *to) {
  if (k->dim == 128) mixed_keys_as(k, tokens, soon, to, 128);
  else mixed_keys_as(k, tokens, soon, to, k->dim);
}

/* Of the tokens from the first on, `count` in number. */
INLINE void mixed_values_as(const Field *v, const Tokens *tokens, int first, int count, const Tokens *soon, uint16_t *to,
                            int64_t dim) {
  const Widths x = widths_of(v, dim);
  const int last = first + count - 1;
  for (int t = first; t < first + TILE; t += 2, to += 32) {
    const int i = t < last ? t : last, j = t + 1 < last ? t + 1 : last;
    const Width u = x.of[tokens->narrow], w = x.of[tokens->narrow];
    const uint8_t *a = mixed_at(&x, tokens, i), *b = mixed_at(&x, tokens, j);
    ask_mixed(&x, soon, t);
    ask_mixed(&x, soon, t + 1);
    for (int64_t d = 0; d < dim; d += 32, a += u.step, b += w.step) {
      const Line one = mixed_fractions(a, &u), two = mixed_fractions(b, &w);
      _mm512_store_si512(to + d * 32, _mm512_unpacklo_epi16(one, two));
      _mm512_store_si512(to + d * 32 + 512, _mm512_unpackhi_epi16(one, two));
    }
  }
}

static void mixed_values(const Field *v, const Tokens *tokens, int first, int count, const Tokens *soon, uint16_t *to) {
  if (v->dim == 128) mixed_values_as(v, tokens, first, count, soon, to, 128);
  else mixed_values_as(v, tokens, first, count, soon, to, v->dim);
}

/* Of mixed pages: by the queries for this width. */
void tiles_dots_mixed(const Field *k, const float *q, int64_t rows, const Tokens *tokens, const Tokens *soon, Tiles *x,
                      float *scores) {
  const int narrow = tokens->narrow;
  mixed_keys(k, tokens, soon, x->made);
  for (int t = 0, n; t < tokens->count; t += n) {
    int64_t page;
    n = of_page(k, tokens, t, &page);
    if (x->from[narrow] != page * k->page || !x->to[narrow]) {
      take_group(k, q, rows, 2 * page + narrow, narrow ? 4 : 16, 1, narrow, x);
      x->from[narrow] = page * k->page;
      x->to[narrow] = x->from[narrow] + k->page;
    }
    products(x, narrow, x->made + t * k->dim, n, rows, k->dim, scores + t);
  }
}

/* Of mixed pages: a page's factors for its channels are applied to the sum over its tokens. */
void tiles_weigh_mixed(const Field *v, const float *p, int64_t rows, const Tokens *tokens, const Tokens *soon, Tiles *x,
                       float *out) {
  const int64_t dim = v->dim;
  const int narrow = tokens->narrow;
  float *factor = x->factor[narrow];
  float weights[rows * TILE] __attribute__((aligned(64))), sums[rows * dim] __attribute__((aligned(64)));
  for (int t = 0, n; t < tokens->count; t += n) {
    int64_t page;
    n = of_page(v, tokens, t, &page);
    mixed_values(v, tokens, t, n, soon, x->made);
    slot_ranges(v, tokens->token + t, n, x->scale, x->zero);
    for (int i = 0; i < TILE; i += LANES) {
      store(x->scale + i, load(x->scale + i) * (narrow ? 4.0f : 16.0f));
      store(x->zero + i, load(x->zero + i) - load(x->scale + i));
    }
    if (page != x->page[narrow]) {
      float each[256];
      widen_run(v->channel, page * dim, dim, v->dtype, each);
      for (int64_t d = 0; d < dim; d += 32)
        for (int i = 0; i < 32; i++) factor[d + place_of(i)] = each[d + channel_of(4, i)];
      x->page[narrow] = page;
    }
    memset(weights, 0, sizeof weights);
    memset(sums, 0, sizeof sums);
    for (int64_t r = 0; r < rows; r++) memcpy(weights + r * TILE, p + r * TILE + t, sizeof(float) * n);
    sums_of(x, weights, rows, dim, dim, sums);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t d = 0; d < dim; d += LANES) {
        float *to = out + r * dim + d;
        store(to, load(to) + load(sums + r * dim + d) * load(factor + d));
      }
  }
}
#endif
