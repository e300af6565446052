/* Values of pages of two widths, 4 bits and 2, by pairs of bfloat16: room is put between the codes of 2, and all are codes
   of 4. */
#include "pairs_inner.h"

#if HALVES
/* A page's factors for its channels are applied to the sum over its tokens. The fractions of both widths have about the
   same middle if those of 2 bits have a rest of 1. */
void pairs_weigh_mixed(const Field *v, const float *p, int64_t rows, const Tokens *tokens, Pairs *known, float *out) {
  const int64_t dim = v->dim;
  const int narrow = tokens->narrow;
  const float steps = narrow ? STEPS / 4 : STEPS, under = middle(v->bits) - 1 - (narrow ? 1 / STEPS : 0);
  float *factor = known->factor[narrow];
  uint8_t room[TILE][128] __attribute__((aligned(64)));
  float weights[rows * TILE], sums[rows * dim] __attribute__((aligned(64)));
  Weights x;
  for (int t = 0, run; t < tokens->count; t += run) {
    int64_t page;
    run = of_page(v, tokens, t, &page);
    slot_ranges(v, tokens->token + t, run, x.scale, x.zero);
    for (int j = 0; j < run; j++) x.at[j] = codes_of(v, tokens, t + j, 1, room[j]);
    for (int j = 0; j < TILE; j += LANES) {
      store(x.scale + j, load(x.scale + j) * steps);
      store(x.zero + j, load(x.zero + j) + load(x.scale + j) * under);
    }
    if (page != known->page[narrow]) {
      float each[256];
      widen_run(v->channel, page * dim, dim, v->dtype, each);
      for (int64_t i = 0; i < dim; i++) factor[i] = each[known->channel[i]];
      known->page[narrow] = page;
    }
    for (int64_t r = 0; r < rows && run < tokens->count; r++) {
      memcpy(weights + r * TILE, p + r * TILE + t, sizeof(float) * run);
      memset(weights + r * TILE + run, 0, sizeof(float) * (TILE - run));
    }
    memset(sums, 0, sizeof sums);
    pair_sums(known, &x, v, 1, run < tokens->count ? weights : p, rows, run, sums);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t d = 0; d < dim; d += LANES)
        store(out + r * dim + d, load(out + r * dim + d) + load(sums + r * dim + d) * load(factor + d));
  }
}
#endif
