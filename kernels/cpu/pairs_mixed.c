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
    memset(sums, 0, sizeof sums);
    pair_sums(known, &x, v, 1, weights_of(p, rows, t, run, tokens->count, weights), rows, run, sums);
    add_times(sums, factors_of(v, page, narrow, known), rows, dim, out);
  }
}
#endif
