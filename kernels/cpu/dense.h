/* Attention to dense keys and values in bfloat16 by the matrix unit, where the processor has one. */
#ifndef KVENGINE_DENSE_H
#define KVENGINE_DENSE_H

#include "fields.h"

#define PAIR 2 /* batches that are read together: queries and results pass through the first-level cache once for both */

/* What a task keeps: one allocation, of which the rest are parts. `blocks` of 16 query rows. */
typedef struct {
  int64_t rows, blocks, dim, dim_v;
  uint16_t *queries; /* [block][32 channels][plane][pair][row][2] */
  uint16_t *made;    /* [batch]: keys that do not follow each other [token, channel]; values by pairs */
  uint16_t *weights; /* [batch][plane][row][token] */
  float *out;        /* [row, channel], channels in the order of the tiles */
} Dense;

int dense_fit(const Field *k, const Field *v, int64_t dim, int64_t dim_v, int64_t rows);
int dense_open(const float *q, int64_t rows, int64_t dim, int64_t dim_v, Dense *x); /* 0 if there is no memory for it */
void dense_dots(const Field *k, int64_t row, const Tokens *const *tokens, const Tokens *const *soon, Dense *x,
                float *const *scores);
void dense_weigh(const Field *v, int64_t row, float *const *p, const Tokens *const *tokens, const Tokens *const *soon,
                 Dense *x);
void dense_close(Dense *x, float *out);

#endif
