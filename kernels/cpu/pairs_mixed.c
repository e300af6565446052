/* Pages of two widths, 4 bits and 2, by pairs of bfloat16: keys by widths, each in its own order; of values, room is put
   between the codes of 2, and all are codes of 4. */
#include "pairs_inner.h"

#if HALVES
void pairs_dots_mixed(const Field *k, int64_t rows, const Tokens *tokens, Pairs *x, float *scores) {
  const uint8_t *const data[2] = {k->data, k->low};
  const int64_t bits[2] = {k->bits, k->low_bits};
  float found[CODED_QUERIES * TILE];
  for (int t = 0, run; t < tokens->count; t += run) {
    int64_t page;
    const uint8_t *at[2][TILE];
    int of[2][TILE], n[2] = {0};
    run = of_page(k, tokens, t, &page);
    if (x->from != page * k->page || !x->to) {
      for (int i = 0; i < 2; i++) take_pairs(k, bits[i], rows, 2 * page + i, x->keys + i);
      x->from = page * k->page;
      x->to = x->from + k->page;
    }
    for (int j = t; j < t + run; j++) {
      const int i = tokens->narrow[j];
      at[i][n[i]] = data[i] + tokens->index[j] * (k->dim * bits[i] / 8);
      of[i][n[i]++] = j;
    }
    for (int i = 0; i < 2; i++) {
      if (!n[i]) continue;
      pair_products(k, bits[i], x->keys + i, rows, at[i], n[i], found);
      for (int64_t r = 0; r < rows; r++)
        for (int j = 0; j < n[i]; j++) scores[r * TILE + of[i][j]] = found[r * TILE + j];
    }
  }
}

/* A page's factors for its channels are applied to the sum over its tokens. The fractions of both widths have about the
   same middle if those of 2 bits have a rest of 1. */
void pairs_weigh_mixed(const Field *v, const float *p, int64_t rows, const Tokens *tokens, Pairs *known, float *out) {
  const int64_t dim = v->dim;
  const float under = middle(v->bits) - 1;
  uint8_t room[TILE][128] __attribute__((aligned(64)));
  float weights[rows * TILE], sums[rows * dim] __attribute__((aligned(64)));
  Weights x;
  for (int t = 0, run; t < tokens->count; t += run) {
    int64_t page;
    run = of_page(v, tokens, t, &page);
    token_ranges(v, tokens->token + t, run, 1, x.scale, x.zero);
    for (int j = 0; j < run; j++) {
      const int narrow = tokens->narrow[t + j];
      x.at[j] = codes_of(v, tokens, t + j, 1, room[j]);
      x.scale[j] *= narrow ? 4 : 16;
      x.zero[j] += x.scale[j] * (narrow ? under - 1.0f / 16 : under);
    }
    for (int j = run; j < TILE; j++) x.scale[j] = x.zero[j] = 0;
    if (page != known->page) {
      float factor[256];
      widen_run(v->channel, page * dim, dim, v->dtype, factor);
      for (int64_t i = 0; i < dim; i++) known->factor[i] = factor[known->channel[i]];
      known->page = page;
    }
    for (int64_t r = 0; r < rows; r++) memcpy(weights + r * TILE, p + r * TILE + t, sizeof(float) * run);
    for (int64_t r = 0; r < rows; r++) memset(weights + r * TILE + run, 0, sizeof(float) * (TILE - run));
    memset(sums, 0, sizeof sums);
    pair_sums(known, &x, v, 1, weights, rows, run, sums);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t d = 0; d < dim; d += LANES)
        store(out + r * dim + d, load(out + r * dim + d) + load(sums + r * dim + d) * load(known->factor + d));
  }
}
#endif
