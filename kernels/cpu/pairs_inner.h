/* What the two files about pairs of bfloat16 share. */
#ifndef KVENGINE_PAIRS_INNER_H
#define KVENGINE_PAIRS_INNER_H

#include "pairs.h"

#if HALVES

/* What values are multiplied by. */
typedef struct {
  float scale[TILE * LANES + LANES], zero[TILE * LANES + LANES]; /* [token, group] of fractions */
  uint32_t weight[4][TILE / 2 * LANES + LANES];                  /* [row][two tokens, group] */
  vf add[4];                                                     /* [row]: lane i is of group i % groups */
  const uint8_t *at[TILE];                                       /* beyond the last token, anywhere */
} Weights;

INLINE float middle(int64_t bits) { return 1.5f - 0.5f / (float)(1 << bits); } /* of all fractions */

void take_pairs(const Field *k, int64_t bits, int64_t rows, int64_t group, Queries *x);
void pair_products(const Queries *x, int64_t bits, int64_t rows, int64_t dim, const uint8_t **at, int n, float *scores);
void pair_sums(const Pairs *known, Weights *x, const Field *v, int64_t groups, const float *p, int64_t rows, int count,
               float *out);
void pairs_dots_mixed(const Field *k, int64_t rows, const Tokens *tokens, Pairs *x, float *scores);
void pairs_weigh_mixed(const Field *v, const float *p, int64_t rows, const Tokens *tokens, Pairs *x, float *out);
#endif

#endif
