/* Attention of a few queries over stored tokens: one pass over the bytes, online softmax, float32.

   A task is a range of one row's columns (tokens offered). It takes BATCH visible tokens at a time, or TILE, and scores all
   query rows against their keys, then weighs their values: as they are stored where that is possible, else widened into a
   tile that stays in the first-level cache.
   Tokens nobody sees are never loaded. Tasks of a row are merged at the end. */
#include <stdlib.h>
#include "attention.h"
#include "codes.h"
#include "dense.h"
#include "pairs.h"
#include "tiles.h"
#include "turned.h"
#include "vectors.h"

#define MAX_QUERY 64
#define FEW 512 /* query rows whose weights any thread's stack has room for; with several queries, latents have more */

typedef struct {
  Tokens is;
  int64_t column[TILE], place[TILE];
  int told; /* whether `seen` says which query sees which token; if not, all see all */
  uint8_t seen[MAX_QUERY][TILE];
} Batch;

/* Does query `n` see the token of this column, at this position? */
INLINE int sees(const Attention *a, int64_t row, int64_t n, int64_t column, int64_t position) {
  if (a->visible && !a->visible[row * a->visible_row + n * a->visible_query + column * a->visible_column]) return 0;
  if (!a->query_position) return 1;
  int64_t distance = a->query_position[row * a->queries + n] - position;
  return distance >= 0 && (!a->window || distance < a->window);
}

/* Add to the batch the tokens of a run of columns that any query sees; returns the column after the last one tried. */
INLINE int64_t collect_run(const Attention *a, int64_t row, int64_t column, int64_t end, int64_t token,
                           const int32_t *position, int most, Batch *b) {
  const int everyone = !a->visible && !a->query_position;
  if (everyone) { /* tokens that are all there, as they mostly are, in loops that become vectors */
    const int at = b->is.count, n = (int)(end - column < most - at ? end - column : most - at);
    int32_t dead = 0;
    for (int i = 0; position && i < n; i++) dead |= position[i];
    if (dead >= 0) {
      if (n == BATCH) /* a constant number */
        for (int i = 0; i < BATCH; i++) b->is.token[at + i] = token + i;
      else
        for (int i = 0; i < n; i++) b->is.token[at + i] = token + i;
      for (int i = 0; a->scores && i < n; i++) b->column[at + i] = column + i;
      for (int i = 0; a->k.layout == LOWRANK && i < n; i++) b->place[at + i] = position ? position[i] : 0;
      b->is.count = at + n;
      b->is.together = n == most;
      return column + n;
    }
  }
  int64_t first = INT64_MAX, last = 0; /* of the queries, where their positions alone decide */
  for (int64_t n = 0; n < a->queries && !a->visible && !everyone; n++) {
    const int64_t at = a->query_position[row * a->queries + n];
    first = at < first ? at : first;
    last = at > last ? at : last;
  }
  for (; column < end && b->is.count < most; column++, token++) {
    int64_t at = position ? *position++ : 0;
    int any = everyone || (!a->visible && at <= first && (!a->window || last - at < a->window));
    if (!any && !b->told) {
      for (int64_t n = 0; n < a->queries; n++) memset(b->seen[n], 1, b->is.count);
      b->told = 1;
    }
    for (int64_t n = 0; n < a->queries && b->told; n++) any |= b->seen[n][b->is.count] = sees(a, row, n, column, at);
    b->is.token[b->is.count] = token;
    b->column[b->is.count] = column;
    b->place[b->is.count] = at;
    b->is.count += any && at >= 0;
  }
  return column;
}

/* Ask for the positions and the first bytes of the batch from this column on: finding out where memory is takes as long
   as reading it, and several searches run at once only if they are asked for together. */
static void look_ahead(const Attention *a, int64_t row, int64_t column, int64_t to, int most) {
  if (!a->table) return;
  const int64_t span = a->units ? a->unit : a->page, end = column + most < to ? column + most : to;
  for (int64_t run; column < end; column += run) { /* tokens that follow each other in one page */
    int64_t index = column / span;
    const int64_t inside = column - index * span;
    run = span - inside < end - column ? span - inside : end - column;
    if (a->units) index = a->units[row * a->chosen + index];
    if (index < 0) continue;
    const int64_t slot = index * span + inside, number = slot / a->page, page = a->table[row * a->table_row + number];
    if (page < 0) continue;
    const int64_t token = page * a->page + slot - number * a->page;
    for (int64_t i = 0; i < run; i += 16) __builtin_prefetch(a->position + row * a->position_row + slot + i, 0, 2);
    fetch_start(&a->k, row, token, run);
    fetch_start(&a->v, row, token, run);
  }
}

/* Fill a batch from the columns [column, to); returns where to go on. */
INLINE int64_t collect_any(const Attention *a, int64_t row, int64_t column, int64_t to, int most, Batch *b) {
  b->is.count = b->is.together = b->told = 0;
  if (!a->table) return collect_run(a, row, column, to, column, NULL, most, b);
  const int64_t span = a->units ? a->unit : a->page; /* columns whose slots follow each other in one page */
  while (column < to && b->is.count < most) {
    int64_t index = column / span, inside = column % span, end = column - inside + span;
    if (end > to) end = to;
    if (a->units) index = a->units[row * a->chosen + index];
    int64_t slot = index * span + inside, page = index < 0 ? -1 : a->table[row * a->table_row + slot / a->page];
    if (page < 0) column = end;
    else
      column = collect_run(a, row, column, end, page * a->page + slot % a->page,
                           a->position + row * a->position_row + slot, most, b);
  }
  return column;
}

/* Tokens of mixed pages by their width: attention asks for no order. Each key group is met once then, and its tokens lie
   side by side. */
typedef struct {
  Batch mixed, of[2];
  int done; /* tokens of `mixed` that were sorted */
} Widths;

static void open_widths(Widths *x) {
  x->mixed.is.count = x->of[0].is.count = x->of[1].is.count = x->done = 0;
  for (int i = 0; i < 2; i++) x->of[i].is.narrow = i, x->of[i].is.together = 0;
}

/* Until the batch of a width is full, which is returned; NULL if none is. Without a branch on the width, which nobody could
   foretell. Keys and values of a page lie alike. */
static Batch *sort_widths(const Attention *a, int most, Widths *x) {
  const Field *f = &a->k;
  const Batch *from = &x->mixed;
  const int64_t size = f->page, more = a->queries > 1 || a->scores;
  const uint8_t *mask = NULL;
  int64_t slot = 0, next = -1, high = 0, low = 0; /* `high`, `low`: numbers of the next token of either width */
  int64_t wide = x->of[0].is.count, less = x->of[1].is.count;
  int t = x->done;
  for (; t < from->is.count && wide < most && less < most; t++, slot++, next++) { /* mostly in order: no division for each */
    const int64_t token = from->is.token[t];
    if (token != next || slot == size) {
      const int64_t page = token / size;
      slot = token - page * size;
      mask = f->mask + page * (size / 8);
      high = salient_before(mask, slot);
      low = page * (size - f->salient) + slot - high;
      high += page * f->salient;
      next = token;
    }
    const int64_t narrow = ~(mask[(uint64_t)slot / 8] >> (slot & 7)) & 1, i = wide ^ ((wide ^ less) & -narrow);
    Batch *to = x->of + narrow;
    to->is.token[i] = token;
    to->is.index[i] = high ^ ((high ^ low) & -narrow);
    less += narrow, low += narrow;
    wide += 1 - narrow, high += 1 - narrow;
    if (!more) continue;
    to->column[i] = from->column[t];
    for (int64_t q = 0; q < a->queries; q++) to->seen[q][i] = from->told ? from->seen[q][t] : 1;
  }
  x->done = t;
  x->of[0].is.count = (int)wide;
  x->of[1].is.count = (int)less;
  return wide == most ? x->of : less == most ? x->of + 1 : NULL;
}

/* As `collect_any`, but for mixed pages tokens of one width; `x` keeps the others. */
static int64_t collect(const Attention *a, int64_t row, int64_t column, int64_t to, int most, Widths *x, Batch *b) {
  if (a->k.layout != MIXED) {
    column = collect_any(a, row, column, to, most, b);
    int64_t apart = b->is.count - most;
    for (int64_t i = 0; i < most && !apart && !b->is.together; i++) apart = b->is.token[i] - b->is.token[0] - i;
    b->is.together = !apart;
    return column;
  }
  Batch *full;
  while (!(full = sort_widths(a, most, x)) && column < to) {
    column = collect_any(a, row, column, to, most, &x->mixed);
    x->done = 0;
  }
  if (!full) full = x->of + !x->of[0].is.count; /* the rest */
  b->is = full->is;
  b->told = a->queries > 1;
  memcpy(b->column, full->column, sizeof b->column);
  memcpy(b->seen, full->seen, b->told * TILE * a->queries);
  full->is.count = 0;
  return column;
}

/* Scores of one batch become weights in place; `top` and `total` (by lane) follow the online softmax, `out` is rescaled. */
static void soften(const Attention *a, int64_t row, const Batch *b, int most, float *s, float *top, float *total, float *out) {
  for (int64_t n = 0; n < a->heads; n++) {
    float *p = s + n * TILE;
    if (a->softcap > 0)
      for (int t = 0; t < most; t += LANES) store(p + t, capped(load(p + t), a->softcap));
    for (int t = b->is.count; t < most; t++) p[t] = -INFINITY;
    if (a->queries > 1 && b->told)
      for (int t = 0; t < b->is.count; t++)
        if (!b->seen[n % a->queries][t]) p[t] = -INFINITY;
    if (a->scores)
      for (int t = 0; t < b->is.count; t++) a->scores[(row * a->heads + n) * a->columns + b->column[t]] = p[t];
    vf peaks = load(p), all = load(total + n * LANES);
    for (int t = LANES; t < most; t += LANES) peaks = larger(peaks, load(p + t));
    if (any_above(peaks, splat(top[n]))) {
      const float high = peak(peaks), shrink = expf(top[n] - high);
      all *= shrink;
      for (int64_t d = 0; d < a->dim_v; d += LANES) store(out + n * a->dim_v + d, load(out + n * a->dim_v + d) * shrink);
      top[n] = high;
    }
    const vf shift = splat(top[n] == -INFINITY ? 0 : top[n]);
    for (int t = 0; t < most; t += LANES) {
      const vf weight = fading(load(p + t) - shift);
      all += weight;
      store(p + t, weight);
    }
    store(total + n * LANES, all);
  }
}

/* How dense bfloat16 is read for many rows; NULL if as anything else. Few rows are as fast so, and keep all bits. */
static const Way *way_of(const Attention *a) {
  const Field *k = &a->k, *v = &a->v;
  if (a->padded <= 4 || k->layout != DENSE || v->layout != DENSE || k->dtype != BF16 || v->dtype != BF16) return NULL;
  if (k->dim != a->dim || v->dim != a->dim_v || a->dim % 32 || a->dim_v % 32) return NULL;
  const Way *by_tiles = dense_by_tiles();
  return by_tiles || a->halves == 0 ? by_tiles : dense_by_pairs();
}

/* `task` in such a way; 0 if there is no memory for it. */
static int dense_task(const Attention *a, const Way *way, int64_t row, int64_t from, int64_t to, float *out, float *top,
                      float *total) {
  float *const both = aligned_alloc(64, sizeof(float) * PAIR * a->padded * TILE);
  float *const weights[PAIR] = {both, both + a->padded * TILE};
  Batch batch[2][PAIR];
  float before[a->padded]; /* the maxima by which the first batch's weights are */
  Dense x;
  if (!both || !way->open(a->q + row * a->padded * a->dim, a->halves, a->padded, a->dim, a->dim_v, &x)) {
    free(both);
    return 0;
  }
  const int pair = x.blocks > 1 ? PAIR : 1; /* one block stays in the first-level cache by itself */
  memset(both, 0, sizeof(float) * PAIR * a->padded * TILE);
  for (int i = 0; i < 2 * PAIR; i++) batch[i / PAIR][i % PAIR].is.count = 0;
  for (int i = 0; i < pair; i++) look_ahead(a, row, from + i * BATCH, to, BATCH);
  for (int i = 0; i < pair; i++) from = collect_any(a, row, from, to, BATCH, &batch[0][i]);
  for (int now = 0; batch[now][0].is.count; now = !now) {
    const Tokens *is[PAIR], *soon[PAIR];
    for (int i = 0; i < pair; i++) look_ahead(a, row, from + i * BATCH, to, BATCH);
    for (int i = 0; i < PAIR; i++) {
      if (i < pair) from = collect_any(a, row, from, to, BATCH, &batch[!now][i]);
      is[i] = &batch[now][i].is;
      soon[i] = &batch[!now][i].is;
    }
    way->dots(&a->k, row, is, soon, &x, weights);
    soften(a, row, &batch[now][0], BATCH, weights[0], top, total, x.out);
    if (is[1]->count) {
      memcpy(before, top, sizeof before);
      soften(a, row, &batch[now][1], BATCH, weights[1], top, total, x.out);
      for (int64_t n = 0; n < a->heads; n++)
        if (top[n] > before[n])
          for (int t = 0; t < BATCH; t += LANES)
            store(weights[0] + n * TILE + t, load(weights[0] + n * TILE + t) * expf(before[n] - top[n]));
    }
    way->weigh(&a->v, row, weights, is, soon, &x);
  }
  way->close(&x, out);
  free(both);
  return 1;
}

/* `task` for codes that are read by pairs. The scores of a batch are made before the sums of the one before, so that neither
   they nor the weights have to be waited for. */
static void paired_task(const Attention *a, int64_t row, int64_t from, int64_t to, float *out, float *top, float *total) {
  const float *q = a->q + row * a->padded * a->dim;
  float room[2][a->padded * TILE] __attribute__((aligned(64))), *weights = room[0], *scores = room[1];
  Pairs pairs;
  Batch batch[3], *now = batch, *next = batch + 1, *then = batch + 2; /* of sums, of scores, and what is asked for */
  Widths widths;
  open_widths(&widths);
  memset(room, 0, sizeof room);
  memset(out, 0, sizeof(float) * a->padded * a->dim_v);
  pairs_keys(&a->k, q, a->padded, &pairs);
  pairs_values(&a->v, &pairs);
  look_ahead(a, row, from, to, TILE);
  look_ahead(a, row, from + TILE, to, TILE);
  from = collect(a, row, from, to, TILE, &widths, next);
  for (now->is.count = 0; now->is.count || next->is.count;) {
    look_ahead(a, row, from + TILE, to, TILE);
    from = collect(a, row, from, to, TILE, &widths, then);
    if (next->is.count) {
      fetch_batch(&a->v, row, &next->is);
      pairs_dots(&a->k, a->padded, &next->is, &pairs, scores);
      fetch_batch(&a->k, row, &then->is);
    }
    if (now->is.count) pairs_weigh(&a->v, weights, a->padded, &now->is, &pairs, out);
    if (next->is.count) soften(a, row, next, TILE, scores, top, total, out);
    Batch *const done = now;
    float *const free = weights;
    now = next, next = then, then = done;
    weights = scores, scores = free;
  }
  pairs_unsort(&a->v, &pairs, out, a->padded);
}

/* `total`: by lane; `weights`: room for a batch's */
static void task(const Attention *a, int64_t row, int64_t from, int64_t to, float *out, float *top, float *total,
                 float *weights) {
  const int64_t wide = a->dim > a->dim_v ? a->dim : a->dim_v;
  float tile[BATCH * wide] __attribute__((aligned(64)));
  float sorted[(a->padded < CODED_QUERIES ? a->padded : CODED_QUERIES) * a->dim]; /* more rows need no order */
  const float *q = a->q + row * a->padded * a->dim;
  const int k_lies = plain(&a->k, a->dim, a->padded), v_lies = plain(&a->v, a->dim_v, a->padded);
  const int tiled = tiles_fit(&a->k, a->dim, a->padded) && tiles_fit(&a->v, a->dim_v, a->padded);
  const int k_paired = !tiled && a->halves && pairs_fit(&a->k, a->dim, a->padded);
  const int v_paired = !tiled && a->halves && pairs_fit(&a->v, a->dim_v, a->padded);
  const int k_coded = !tiled && !k_paired && codes_lie(&a->k, a->dim, a->padded);
  const int v_coded = !tiled && !v_paired && codes_lie(&a->v, a->dim_v, a->padded);
  const int k_mixed = !tiled && !k_paired && mixed_lie(&a->k, a->dim, a->padded);
  const int v_mixed = !tiled && !v_paired && mixed_lie(&a->v, a->dim_v, a->padded);
  const int k_turned = turned_lie(&a->k, a->dim, a->padded), v_turned = turned_lie(&a->v, a->dim_v, a->padded);
  const int k_halved = HALVES && k_lies && a->halves != 0 && a->k.dtype == BF16;
  const Way *const way = way_of(a);
  Turned turned;
  Vectors x;
  Memo keys, values;
  KeyGroup group[2]; /* of mixed codes, each width has its own */
  Tiles tiles;
  Pairs pairs;
  Batch both[2], *b = both, *next = both + 1;
  Widths widths;
  for (int64_t n = 0; n < a->padded; n++) top[n] = -INFINITY, store(total + n * LANES, splat(0));
  if (way && dense_task(a, way, row, from, to, out, top, total)) return;
  if (k_paired && v_paired) {
    paired_task(a, row, from, to, out, top, total);
    return;
  }
  open_widths(&widths);
  memset(&keys, 0, sizeof keys);
  memset(&values, 0, sizeof values);
  memset(tile, 0, sizeof tile);
  memset(weights, 0, sizeof(float) * a->padded * TILE);
  memset(out, 0, sizeof(float) * a->padded * a->dim_v);
#if HALVES
  if (k_halved) halve(q, a->halves, a->padded * a->dim, (uint16_t *)sorted);
#endif
  if (k_lies && a->k.dtype == BF16 && !k_halved) {
    sort(q, a->padded * a->dim, sorted);
    q = sorted;
  }
  if (k_turned || v_turned) turned_open(&a->k, &a->v, q, a->padded, a->halves != 0, &turned);
  if (k_coded || k_mixed) {
    open_codes(&a->k, group);
    sort_channels(&a->k, q, a->padded, sorted);
  }
  if (tiled) tiles_open(&a->k, q, a->padded, &tiles);
  if (k_paired) pairs_keys(&a->k, q, a->padded, &pairs);
  if (v_paired) pairs_values(&a->v, &pairs);
  look_ahead(a, row, from, to, BATCH);
  look_ahead(a, row, from + BATCH, to, BATCH);
  from = collect(a, row, from, to, BATCH, &widths, b);
  while (b->is.count) {
    look_ahead(a, row, from + BATCH, to, BATCH);
    from = collect(a, row, from, to, BATCH, &widths, next);
    const int64_t *key = a->k.layout == LOWRANK ? b->place : b->is.token;
    if (!v_lies && !tiled) fetch_batch(&a->v, row, &b->is);
    if (tiled) tiles_dots(&a->k, q, a->padded, &b->is, &next->is, &tiles, weights);
    else if (k_paired) pairs_dots(&a->k, a->padded, &b->is, &pairs, weights);
    else if (k_turned) turned_dots(&a->k, a->padded, &b->is, &turned, weights);
    else if (k_coded) dots_codes(&a->k, group, q, sorted, a->padded, &b->is, weights);
    else if (k_mixed) dots_mixed(&a->k, group, q, sorted, a->padded, &b->is, weights);
    else {
      if (a->k.dim != a->v.dim) memset(tile, 0, sizeof tile); /* values may lie where keys have no channels */
      locate(&a->k, &keys, row, k_lies, key, b->is.count, &next->is, a->dim, tile, &x);
#if HALVES
      if (k_halved) dots_halved((const uint16_t *)sorted, a->halves, x.at, x.soon, b->is.count, a->dim, weights);
      else
#endif
      dots(q, a->padded, x.at, k_lies ? x.soon : NULL, b->is.count, a->dim, weights, x.dtype);
    }
    if (!k_lies && !tiled) fetch_batch(&a->k, row, &next->is);
    soften(a, row, b, BATCH, weights, top, total, out);
    if (tiled) tiles_weigh(&a->v, weights, a->padded, &b->is, &next->is, &tiles, out);
    else if (v_paired) pairs_weigh(&a->v, weights, a->padded, &b->is, &pairs, out);
    else if (v_turned) turned_weigh(&a->v, weights, a->padded, &b->is, &turned, out);
    else if (v_coded) weigh_codes(&a->v, weights, a->padded, &b->is, out);
    else if (v_mixed) weigh_mixed(&a->v, weights, a->padded, &b->is, out);
    else {
      locate(&a->v, &values, row, v_lies, b->is.token, b->is.count, &next->is, a->dim_v, tile, &x);
      weigh(weights, a->padded, x.at, v_lies ? x.soon : NULL, b->is.count, a->dim_v, out, x.dtype);
    }
    Batch *done = b;
    b = next;
    next = done;
  }
  if (tiled) {
    tiles_close();
    tiles_unsort(&a->v, out, a->padded);
  }
  if (v_lies && a->v.dtype == BF16) unsort(out, a->padded * a->dim_v);
  if (v_paired) pairs_unsort(&a->v, &pairs, out, a->padded);
  if (v_turned) turned_unsort(&a->v, &turned, out, a->padded);
  if (v_coded || v_mixed) unsort_channels(&a->v, out, a->padded);
}

static void join(const Attention *a, int64_t row, const float *out, const float *top, const float *total) {
  for (int64_t n = 0; n < a->heads; n++) {
    float high = a->sinks ? a->sinks[row * a->heads + n] : -INFINITY, whole = 0;
    for (int64_t s = 0; s < a->splits; s++) high = fmaxf(high, top[s * a->padded + n]);
    for (int64_t s = 0; s < a->splits; s++)
      if (isnan(total[s * a->padded + n])) high = NAN; /* where all scores of a split are, it has no top */
    if (a->sinks && high > -INFINITY) whole = expf(a->sinks[row * a->heads + n] - high);
    float *to = a->out + (row * a->heads + n) * a->dim_v;
    memset(to, 0, sizeof(float) * a->dim_v);
    for (int64_t s = 0; s < a->splits && high != -INFINITY; s++) {
      float weight = expf(top[s * a->padded + n] - high);
      whole += weight * total[s * a->padded + n];
      const float *part = out + (s * a->padded + n) * a->dim_v;
      for (int64_t d = 0; d < a->dim_v; d++) to[d] += weight * part[d];
    }
    for (int64_t d = 0; d < a->dim_v && whole > 0; d++) to[d] /= whole;
    if (a->v.layout == TURNED) {
      float back[a->dim_v];
      turn_rows(&a->v, to, 1, a->dim_v, back);
      memcpy(to, back, sizeof back);
    }
    a->lse[row * a->heads + n] = whole != 0 ? high + logf(whole) : -INFINITY;
  }
}

/* Returns 0, or 1 if memory for the buffers cannot be had. */
int kv_attention(const Attention *call) {
  Attention mine = *call, *const a = &mine;
  const int64_t splits = a->splits, tasks = a->rows * splits, span = (a->columns + splits - 1) / splits;
  const int64_t outs = a->padded * a->dim_v, asked = a->padded * a->dim, all = a->rows * asked;
  const int64_t raw = !a->q, turning = a->k.layout == TURNED;
  const int64_t room = (raw + turning) * all + tasks * (outs + 2 * a->padded);
  float *held = aligned_alloc(64, (sizeof(float) * room / 64 + 1) * 64);
  int *left = malloc(sizeof(int) * a->rows + 1);
  if (!held || !left) {
    free(held);
    free(left);
    return 1;
  }
  float *turned = held + raw * all, *parts = turned + turning * all;
  float *tops = parts + tasks * outs, *totals = tops + tasks * a->padded;
  for (int64_t row = 0; row < a->rows; row++) left[row] = splits;
  if (raw) {
    kv_queries(a->given, a->given_dtype, a->rows, a->heads, a->given_row, a->given_head, a->given_dim, a->padded, a->dim, 0,
               a->scale, held);
    a->q = held;
  }
  if (turning) {
#pragma omp parallel for schedule(static) num_threads(a->threads)
    for (int64_t row = 0; row < a->rows; row++) turn_rows(&a->k, a->q + row * asked, a->padded, a->dim, turned + row * asked);
    a->q = turned;
  }
  const int64_t each = a->padded * (LANES + TILE), many = a->padded > FEW;
  int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(a->threads)
  for (int64_t i = 0; i < tasks; i++) {
    int64_t row = i / splits, first = row * splits, from = i % splits * span;
    int64_t to = from + span < a->columns ? from + span : a->columns;
    float near[many ? LANES : each] __attribute__((aligned(64)));
    float *const total = many ? aligned_alloc(64, (sizeof(float) * each + 63) / 64 * 64) : near;
    if (!total) {
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
      continue;
    }
    task(a, row, from, to, parts + i * outs, tops + i * a->padded, total, total + a->padded * LANES);
    for (int64_t n = 0; n < a->padded; n++) totals[i * a->padded + n] = sum(load(total + n * LANES));
    if (many) free(total);
    if (__atomic_sub_fetch(&left[row], 1, __ATOMIC_ACQ_REL) == 0) /* the row's last task joins its parts */
      join(a, row, parts + first * outs, tops + first * a->padded, totals + first * a->padded);
  }
  free(held);
  free(left);
  return failed;
}
