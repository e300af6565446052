/* Which tokens stay after a decoded one, see `Ends`, `Paid` and `Placed` in step/native.py. */
#include "step.h"

/* What each token was paid by the row's queries, from their logits: the sum over them and over the rows that judge
   `together`, or the `most` of the row's own, times `part`. */
void payments(const Step *s, const float *logits, const float *lse, int64_t columns, int64_t wide, int64_t threads,
              float *paid) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t g = 0; g < s->rows / s->together; g++) {
    float *to = paid + g * s->together * wide;
    memset(to, 0, sizeof(float) * wide);
    for (int64_t n = g * s->together * s->group; n < (g + 1) * s->together * s->group; n++)
      for (int64_t c = 0; c < columns; c += LANES) {
        const vf x = exponential(load(logits + n * columns + c) - lse[n]) * s->part, before = load(to + c);
        store(to + c, s->most ? larger(x, before) : (vf)(before + x));
      }
    for (int64_t r = 1; r < s->together; r++) memcpy(to + r * wide, to, sizeof(float) * wide);
  }
}

/* The slots of a row from `start` on are judged by what was paid to each: `paid` becomes what decides. Returns the first
   of those that lose their token; -1 if none does. */
int64_t judge(const Step *s, int64_t row, int64_t columns, float *paid) {
  int32_t *position = s->position + row * s->slots + s->start;
  float *score = s->score ? s->score + row * s->slots + s->start : NULL;
  const int32_t newest = position_at(s->at - s->recent[row]), first = s->first ? position_at(s->first[row]) : 0;
  int64_t over = -s->budget[row], lost = -1;
  for (int64_t c = 0; c < columns; c++) {
    const float x = (score && s->adds ? score[c] : 0) + paid[c];
    const int rank = (position[c] > newest) + 2 * (position[c] < first);
    if (score) score[c] = x;
    paid[c] = position[c] < 0 ? INFINITY : rank ? 1e30f * rank : x;
    over += position[c] >= 0;
  }
  for (int64_t c = columns; c % LANES; c++) paid[c] = INFINITY;
  for (; over > 0; over--) { /* one, as a rule; the earlier token of two that are equal */
    float low = INFINITY;
    vf lows = splat(INFINITY);
    uint32_t oldest = UINT32_MAX;
    int64_t least = 0;
    for (int64_t c = 0; c < columns; c += LANES) lows = -larger(-load(paid + c), -lows);
    for (int i = 0; i < LANES; i++) low = lows[i] < low ? lows[i] : low;
    for (int64_t c = 0; c < columns; c++) { /* no token: beyond all */
      const uint32_t at = paid[c] <= low ? (uint32_t)position[c] : UINT32_MAX;
      oldest = at < oldest ? at : oldest;
    }
    if (oldest > INT32_MAX) break;
    while ((uint32_t)position[least] != oldest) least++;
    position[least] = -1;
    paid[least] = INFINITY;
    lost = lost < 0 || least < lost ? least : lost;
  }
  return lost;
}

/* Of a row that holds more than its budget, the token goes whose position is the `place`-th: it is found by halving the
   range in which it lies, as slots are in no order. */
void judge_places(const Step *s, int64_t row, int64_t columns) {
  int32_t *position = s->position + row * s->slots + s->start, low = 0, high = 0, held = 0;
  for (int64_t c = 0; c < columns; c++) {
    high = position[c] > high ? position[c] : high;
    held += position[c] >= 0;
  }
  if (held <= s->budget[row]) return;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    int32_t upto = 0;
    for (int64_t c = 0; c < columns; c++) upto += (uint32_t)position[c] <= (uint32_t)middle; /* no token: beyond all */
    if (upto > s->place[row]) high = middle;
    else low = middle + 1;
  }
  for (int64_t c = 0; c < columns; c++) position[c] = position[c] == low ? -1 : position[c];
}

/* Only a row's first tokens and its newest stay; whether there are any. */
static int keep_ends(const Step *s, int64_t row, int32_t *position, int64_t columns) {
  const int32_t from = position_at(s->first[row]), to = position_at(s->at - s->recent[row]);
  int32_t none = -1;
  for (int64_t c = 0; c < columns; c++) {
    position[c] = position[c] >= from && position[c] <= to ? -1 : position[c];
    none &= position[c];
  }
  return none >= 0;
}

void judge_ends(const Step *s, int64_t row, int64_t columns) {
  keep_ends(s, row, s->position + row * s->slots + s->start, columns);
}

/* The same of sealed tokens. */
void judge_sealed(const Step *s, int64_t row) {
  int32_t *position = s->sealed + row * s->sealed_row;
  for (int64_t u = 0; u < s->units; u++)
    s->alive[row * s->alive_row + u] = (uint8_t)keep_ends(s, row, position + u * s->unit, s->unit);
}
