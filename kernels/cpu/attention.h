/* One call of the attention kernel. Mirrored in call.py. */
#ifndef KVENGINE_ATTENTION_H
#define KVENGINE_ATTENTION_H

#include "fields.h"

typedef struct {
  int64_t rows, heads, padded, queries; /* `heads` = group * query rows of q, `padded` up to a multiple of 4 */
  int64_t dim, dim_v;                   /* multiples of MULTIPLE: the padded widths of q and out */
  int64_t columns, splits, threads;
  const float *q; /* [row, padded, dim], scaled; or NULL, and */
  const char *given; /* [row, heads, given_dim], as they are, and the strides of the first two */
  int64_t given_dtype, given_dim, given_row, given_head;
  Field k, v;
  /* contiguous: [row, query, column], bytes, by strides; NULL = all */
  const uint8_t *visible;
  int64_t visible_row, visible_query, visible_column;
  /* paged: table != NULL */
  const int32_t *table, *position, *units, *query_position;
  int64_t table_row, position_row; /* strides; the rest is contiguous */
  int64_t page, unit, chosen, window;
  float softcap; /* 0: none */
  float scale;   /* of what is `given` */
  float halves;  /* the scale that is in q, if q was bfloat16: then what it meets may be rounded likewise. Else 0 */
  const float *sinks;
  float *scores; /* [row, heads, columns] or NULL */
  float *out, *lse;
} Attention;

int kv_attention(const Attention *a);

#endif
