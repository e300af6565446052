/* Attention of many query rows to dense keys and values in bfloat16, by the matrix unit or by products of pairs. */
#ifndef KVENGINE_DENSE_H
#define KVENGINE_DENSE_H

#include "fields.h"

#define PAIR 2 /* batches that are read together: queries and results pass through the first-level cache once for both */

/* What a task keeps: one allocation, of which the rest are parts. `blocks` of 16 query rows. */
typedef struct {
  int64_t rows, blocks, dim, dim_v;
  float scale;       /* of the scores, where the queries have none in them */
  uint16_t *queries; /* [block][32 channels][plane][pair][row][2] */
  uint16_t *made;    /* [batch]: keys that do not follow each other [token, channel]; values by pairs */
  uint16_t *weights; /* [batch][plane][row][token] */
  float *out;        /* [row, channel], channels in the order of `pairs_of` */
} Dense;

/* How a processor does it. */
typedef struct {
  int (*open)(const float *q, float scale, int64_t rows, int64_t dim, int64_t dim_v, Dense *x); /* 0: no memory for it */
  void (*dots)(const Field *k, int64_t row, const Tokens *const *tokens, const Tokens *const *soon, Dense *x,
               float *const *scores);
  void (*weigh)(const Field *v, int64_t row, float *const *p, const Tokens *const *tokens, const Tokens *const *soon,
                Dense *x);
  void (*close)(Dense *x, float *out);
} Way;

const Way *dense_by_tiles(void); /* NULL where there is none */
const Way *dense_by_pairs(void);

#endif
