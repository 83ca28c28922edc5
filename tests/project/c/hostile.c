/* hostile SEED CALLS: random calls of tree and attention with arguments that are null, misaligned, huge, negative, of
 * another tree, in the wrong order and after the tree is gone. Whatever they return, a sanitizer has nothing to report,
 * each failure has a text that names what was expected as the header does, and what was called so still works. */
#include <chunkattn/c/chunkattn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { many = 24, buffer_size = 4096 };
enum { num_pages = 40, largest_page = 128, kv_heads = 2, qo_heads = 4, dim = 8, most_rows = 4000 };

static uint64_t state;
static uint64_t next(void) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}
static int chance(int percent) { return (int)(next() % 100) < percent; }
static int below(int n) { return (int)(next() % (uint64_t)n); }

static chunkattn_tree *trees[2];
static chunkattn_sequence *sequences[many];
static chunkattn_step *steps[4];
static chunkattn_pin *pins[4];
static chunkattn_plan *plans[4]; /* two of steps, none, one of page tables */
static chunkattn_events *events[2];
static chunkattn_mirror *mirror;
static _Alignas(8) char memory[buffer_size * sizeof(int64_t) + 8];
static int32_t tokens[buffer_size];
static chunkattn_attention *attention; /* of K/V of int8 */
static _Alignas(8) int8_t pages[2][num_pages * kv_heads * largest_page * dim];
static float scales[2][num_pages * kv_heads * largest_page];
static float rows[2][most_rows * qo_heads * (dim + 4)], denominators[most_rows * qo_heads + 1];
static long num_computed, num_written;

/* Memory of `buffer_size` numbers; or none, or an odd address. */
static void *any_memory(void) { return chance(4) ? NULL : memory + (chance(4) ? 1 : 0); }
static const int32_t *any_tokens(void) {
  return chance(4) ? NULL : (const int32_t *)(const void *)((const char *)(tokens + below(8)) + (chance(4) ? 2 : 0));
}
/* A length: of a prompt most often, of what no prompt has else. */
static int64_t any_length(int64_t most) {
  switch (below(16)) {
    case 0: return -1;
    case 1: return INT64_MIN;
    case 2: return 0;
    default: return 1 + (int64_t)(next() % (uint64_t)most);
  }
}
/* A number that must only be compared with a bound. */
static int64_t any_number(void) {
  static const int64_t odd[] = {-1, 0, 1, INT64_MIN, INT64_MAX, INT32_MAX, (int64_t)1 << 31, (int64_t)1 << 30, -2};
  return chance(40) ? odd[below(9)] : below(200);
}
static chunkattn_tree *any_tree(void) { return chance(3) ? NULL : trees[below(2)]; }
static chunkattn_sequence *any_sequence(void) { return sequences[below(many)]; } /* perhaps NULL */
static const chunkattn_insert_options *any_options(chunkattn_insert_options *o) {
  memset(o, 0, sizeof *o);
  if (chance(50)) return NULL;
  o->tenant = next() % 3, o->priority = (int32_t)next(), o->no_output = chance(20), o->preempted = chance(20);
  if (chance(20)) o->public_length = any_number();
  if (chance(20)) o->max_reuse = any_number();
  return o;
}
static int num_events;
static void on_event(void *context, const chunkattn_event *event, const int32_t *of) {
  int32_t result;
  (void)context, ++num_events;
  if (mirror != NULL && chunkattn_mirror_apply(mirror, event, of, &result) != 0)
    fprintf(stderr, "%s\n", chunkattn_error()), exit(1);
}
static chunkattn_tree *make_tree(int good) {
  chunkattn_tree_config config = {.version = CHUNKATTN_C_VERSION, .chunk_size = 16 << below(4), .max_chunks = 40};
  config.max_pinned = 5, config.no_retention = chance(30), config.by_priority = chance(30), config.sharing = below(2), config.fair = chance(30);
  if (!good) {
    int32_t *field = (int32_t *)&config + below((int)(sizeof config / sizeof(int32_t)));
    *field = (int32_t)any_number();
  }
  return chunkattn_tree_create(&config);
}

/* No distance that rows can have. */
static int64_t odd_stride(void) {
  static const int64_t odd[] = {-1, 1, dim - 1, INT64_MIN, INT64_MAX, -dim};
  return odd[below(6)];
}
static void *moved(void *data) { return chance(3) ? NULL : (char *)data + (chance(3) ? 1 : 0); }
static chunkattn_layer dense_layer(int32_t page_size) {
  chunkattn_layer l = {pages[0], pages[1], num_pages, page_size, {0}, {0}, scales[0], scales[1], 0, {0}};
  l.k_strides[0] = l.v_strides[0] = kv_heads * page_size * dim;
  l.k_strides[1] = l.v_strides[1] = page_size * dim, l.k_strides[2] = l.v_strides[2] = dim;
  l.scale_strides[0] = kv_heads * page_size, l.scale_strides[1] = page_size;
  return l;
}
static const chunkattn_layer *any_layer(chunkattn_layer *l, int32_t page_size) {
  *l = dense_layer(page_size);
  if (chance(20)) l->scales = 1 + below(2), l->scale_strides[0] = l->scale_strides[1] = 0;
  if (chance(85)) return l;
  switch (below(11)) {
    case 0: return NULL;
    case 1: l->k = NULL; break;
    case 2: l->v = chance(50) ? NULL : l->k; break;
    case 3: l->num_pages = (int32_t)any_number(); break;
    case 4: l->page_size = (int32_t)any_number(); break;
    case 5: l->k_strides[below(3)] = odd_stride(); break;
    case 6: l->v_strides[below(3)] = odd_stride(); break;
    case 7: l->k_scale = moved(l->k_scale); break;
    case 8: l->v_scale = chance(50) ? l->k_scale : moved(l->v_scale); break;
    case 9: l->scales = (int32_t)any_number(); break;
    default: l->scale_strides[below(2)] = odd_stride();
  }
  return l;
}
static const chunkattn_rows *any_rows(chunkattn_rows *r, float *data, int heads) {
  r->data = moved(data), r->stride_token = r->stride_head = 0;
  switch (below(4)) {
    case 0: break;
    case 1: r->stride_head = dim, r->stride_token = heads * dim + below(9); break;
    case 2: r->stride_head = dim + below(3), r->stride_token = heads * (dim + 3); break;
    default: r->stride_head = most_rows * dim, r->stride_token = dim; /* all tokens of a head */
  }
  if (chance(8)) *(chance(50) ? &r->stride_head : &r->stride_token) = odd_stride();
  return chance(2) ? NULL : r;
}
static const chunkattn_variant *any_variant(chunkattn_variant *v) {
  static float sinks[qo_heads + 1], slopes[qo_heads + 1];
  static const float caps[] = {0, 30, 1e-30f, -1, INFINITY, NAN};
  if (chance(50)) return NULL;
  memset(v, 0, sizeof *v);
  for (int i = 0; i < qo_heads; ++i) sinks[i] = (float)below(9), slopes[i] = (float)below(20) / 8;
  if (chance(50)) v->window = chance(20) ? (int32_t)any_number() : below(100);
  if (chance(30)) v->soft_cap = caps[below(6)];
  if (chance(30)) v->sinks = moved(sinks);
  if (chance(20)) v->alibi_slopes = moved(slopes);
  return v;
}
/* The rows of a plan's batch; or another number of them, more of which are not read. */
static int32_t any_count(const chunkattn_plan *plan) {
  chunkattn_sharing sharing;
  return chance(10) || chunkattn_plan_sharing(plan, &sharing) != 0 ? (int32_t)any_number() : sharing.num_tokens;
}
static int fits(const chunkattn_plan *plan) {
  chunkattn_sharing sharing;
  return plan == NULL || (chunkattn_plan_sharing(plan, &sharing) == 0 && sharing.num_tokens <= most_rows);
}
static int run(const chunkattn_plan *plan, int32_t page_size) {
  chunkattn_layer layer;
  chunkattn_variant variant;
  chunkattn_rows q, out;
  if (!fits(plan)) return 0;
  const chunkattn_rows *q_rows = any_rows(&q, rows[0], qo_heads);
  const chunkattn_rows *out_rows = any_rows(&out, rows[chance(5) ? 0 : 1], qo_heads);
  if (chance(3)) out.data = chance(50) ? (void *)pages[below(2)] : (void *)scales[below(2)];
  float *lse = chance(50) ? NULL : moved(chance(5) ? rows[below(2)] : denominators);
  const int failed = chunkattn_run_rows(chance(1) ? NULL : attention, plan, any_layer(&layer, page_size),
                                        any_variant(&variant), q_rows, any_count(plan), out_rows, lse);
  return num_computed += failed == 0, failed;
}
static int write_some(const chunkattn_plan *plan, int32_t page_size) {
  chunkattn_layer layer;
  chunkattn_rows k, v;
  if (!fits(plan)) return 0;
  const chunkattn_rows *k_rows = any_rows(&k, rows[0], kv_heads), *v_rows = any_rows(&v, rows[1], kv_heads);
  const int failed = chunkattn_write_rows(chance(1) ? NULL : attention, plan, any_layer(&layer, page_size), k_rows,
                                          v_rows, any_count(plan));
  return num_written += failed == 0, failed;
}
static int build(void) {
  enum { sequences = 4, columns = 8 };
  int32_t table[sequences][columns], lens[sequences], starts[sequences + 1] = {0};
  for (int s = 0; s < sequences; ++s) {
    for (int i = 0; i < columns; ++i) table[s][i] = i < 2 ? i + 1 : below(num_pages);
    lens[s] = 1 + below(16 * columns), starts[s + 1] = starts[s] + 1 + below(lens[s]);
  }
  chunkattn_tables t = {table[0], columns, lens, starts, 1 + below(sequences)};
  if (chance(20)) switch (below(6)) {
      case 0: table[below(sequences)][below(columns)] = (int32_t)any_number(); break;
      case 1: lens[below(sequences)] = (int32_t)any_number(); break;
      case 2: starts[below(sequences + 1)] = (int32_t)any_number(); break;
      case 3: t.stride = below(columns) - 1; break;
      case 4: t.num_sequences = chance(50) ? -below(2) : INT32_MIN; break;
      default: *(chance(50) ? &t.seq_lens : &t.query_start_loc) = moved(lens);
    }
  return chunkattn_plan_build(plans[chance(90) ? 3 : below(3)], chance(3) ? NULL : &t);
}

static int64_t call(void) {
  chunkattn_insert_options options;
  chunkattn_match match;
  chunkattn_tree_stats stats;
  chunkattn_sequence_info info;
  chunkattn_added added;
  chunkattn_row row = {next() % 50, (int32_t)next(), (int32_t)next(), (int32_t)next(), 1, 0, 1};
  chunkattn_event event = {next() % 3, next() % 20,           next() % 20,           next() % 20,           0, 0,
                           0,          (int32_t)(next() % 4), (int32_t)any_number(), (int32_t)any_number(), 0, 0};
  chunkattn_snapshot snapshot;
  int32_t result;
  int64_t begin, length;
  const int s = below(many), st = below(4), p = below(4);
  int64_t wide = any_length(300);
  switch (below(49)) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 4:
    case 5:
      if (sequences[s] != NULL && chance(50)) return chunkattn_sequence_destroy(sequences[s]), sequences[s] = NULL, 0;
      if (sequences[s] != NULL) return 0;
      return chunkattn_tree_insert(any_tree(), any_tokens(), chance(1) ? (int64_t)1 << 40 : wide,
                                   any_options(&options), chance(3) ? NULL : &sequences[s]);
    case 6:
      return chunkattn_tree_match(any_tree(), any_tokens(), wide, any_options(&options), chance(3) ? NULL : &match);
    case 7: return chunkattn_tree_chunks_needed(any_tree(), any_tokens(), wide, any_options(&options));
    case 8: return chunkattn_tree_get_stats(any_tree(), chance(3) ? NULL : &stats);
    case 9: return chunkattn_tree_set_tenant(any_tree(), next() % 3, (int32_t)any_number(), any_number());
    case 10: return chance(10) ? chunkattn_tree_clear(any_tree()) : 0;
    case 11: return chance(10) ? chunkattn_tree_trim(any_tree(), any_number()) : 0;
    case 12: return chunkattn_tree_expire(any_tree(), next() % 1000);
    case 13:
      if (pins[p] != NULL) return chunkattn_pin_destroy(pins[p]), pins[p] = NULL, 0;
      return chunkattn_tree_pin(any_tree(), any_tokens(), wide, any_options(&options), chance(3) ? NULL : &pins[p]);
    case 14: return chunkattn_pin_size(pins[p]);
    case 15: return chunkattn_sequence_get_info(any_sequence(), chance(3) ? NULL : &info);
    case 16: return chunkattn_sequence_append(any_sequence(), any_tokens(), wide);
    case 17:
      if (sequences[s] != NULL) return 0;
      return chunkattn_sequence_fork(any_sequence(), any_number(), chance(3) ? NULL : &sequences[s]);
    case 18: return chunkattn_sequence_truncate(any_sequence(), any_number());
    case 19: return chunkattn_sequence_take_over(any_sequence());
    case 20: return chunkattn_sequence_tokens(any_sequence(), any_number(), any_length(buffer_size), any_memory());
    case 21: return chunkattn_sequence_pieces(any_sequence(), any_number(), any_number(), any_memory(), below(200));
    case 22: return chunkattn_sequence_blocks(any_sequence(), any_number(), any_memory(), below(200));
    case 23:
      return chunkattn_sequence_loadable(any_sequence(), chance(3) ? NULL : &begin, chance(3) ? NULL : &length);
    case 24: return chunkattn_sequence_mark_loaded(any_sequence(), any_number(), any_number());
    case 25:
    case 26:
      if (steps[st] != NULL && chance(40)) return chunkattn_step_destroy(steps[st]), steps[st] = NULL, 0;
      if (steps[st] != NULL) return 0;
      steps[st] = chunkattn_step_begin(any_tree());
      return steps[st] == NULL ? -1 : 0;
    case 27:
    case 28:
    case 29: {
      int32_t parents[8];
      for (int i = 0; i < 8; ++i) parents[i] = chance(90) ? below(i + 1) - 1 : (int32_t)next();
      const int drafts = chance(70) ? 0 : below(10) - 1;
      return chunkattn_step_add(steps[st], any_sequence(), chance(80) ? 0 : any_number(), any_tokens(),
                                chance(60) ? NULL : parents, drafts, chance(3) ? NULL : &added);
    }
    case 30:
      return chunkattn_step_add_all(steps[st], chance(3) ? NULL : sequences, below(many + 2) - 1, any_number(),
                                    &added);
    case 31:
    case 32: {
      const chunkattn_plan *plan = plans[p];
      const int failed = chunkattn_step_build(steps[st], plans[p]);
      if (failed == 0) /* its pages are of one of these sizes */
        for (int32_t size = 16; size <= largest_page; size *= 2)
          if (write_some(plan, size) == 0) (void)run(plan, size);
      return failed;
    }
    case 33:
      return chunkattn_step_tokens(steps[st], 0, any_memory(),
                                   chance(50) ? any_length(300) : chunkattn_step_num_rows(steps[st]));
    case 34:
      return chunkattn_step_positions(steps[st], any_memory(),
                                      chance(50) ? any_length(300) : chunkattn_step_num_rows(steps[st]));
    case 35:
      if (chance(50)) return chunkattn_plan_slots(plans[below(3)], any_memory(), any_length(100));
      return chunkattn_plan_copies(plans[below(3)], any_memory(), below(50) - 1);
    case 36: return chance(30) ? chunkattn_step_submit(steps[st]) : 0;
    case 37: return chunkattn_step_finish(steps[st]);
    case 38: return chunkattn_step_rows(steps[st], any_memory(), below(50));
    case 39:
      if (chunkattn_step_rows(steps[st], (chunkattn_row *)(void *)memory, 1) == 1 && chance(80))
        memcpy(&row, memory, sizeof row);
      if (chance(30))
        return chunkattn_step_commit_branch(steps[st], &row, (int32_t)any_number(), any_tokens(), below(6) - 1);
      return chunkattn_step_commit(steps[st], chance(3) ? NULL : &row, any_tokens(), below(4) - 1);
    case 40: return chunkattn_step_commit_all(steps[st], any_tokens(), below(6) - 1);
    case 41:
      memset(&snapshot, 0, sizeof snapshot);
      if (chunkattn_events_snapshot(events[below(2)], &snapshot) == 0 && chance(50))
        snapshot.num_tokens -= chance(50);
      snapshot.unit += chance(5);
      return chunkattn_mirror_load(mirror, chance(3) ? NULL : &snapshot);
    case 42:
    case 43: return run(plans[chance(50) ? 3 : p], 16);
    case 44:
    case 45: return write_some(plans[chance(50) ? 3 : p], 16);
    case 46:
    case 47: return build();
    default:
      if (chance(10)) { /* of a mirror that follows nothing, since its stream is another one */
        chunkattn_mirror *other = chunkattn_mirror_create(16, 0);
        const int64_t failed = chunkattn_mirror_apply(other, &event, any_tokens(), chance(3) ? NULL : &result);
        return chunkattn_mirror_destroy(other), failed;
      }
      if (chance(5)) return chunkattn_tree_device_idle(any_tree());
      if (chance(5)) { /* a tree goes, its handles stay */
        const int t = below(2);
        chunkattn_events_destroy(chance(50) ? events[t]
                                            : (chunkattn_tree_destroy(trees[t]), trees[t] = NULL, events[t]));
        chunkattn_tree_destroy(trees[t]);
        trees[t] = make_tree(1);
        events[t] = chunkattn_events_create(trees[t], on_event, NULL, 0);
        return 0;
      }
      if (chance(30)) {
        chunkattn_tree *bad = make_tree(0);
        chunkattn_tree_destroy(bad);
        return bad == NULL ? -1 : 0;
      }
      return chunkattn_mirror_match(mirror, any_tokens(), wide, any_options(&options));
  }
}

/* Says what was expected, by the names of the headers for C. */
static int explains(const char *text) {
  if (strstr(text, "expected") == NULL && strstr(text, "out of chunks") == NULL) return 0;
  for (const char *call = text; (call = strstr(call, "()")) != NULL; ++call) {
    const char *name = call;
    while (name > text && (name[-1] == '_' || (name[-1] >= 'a' && name[-1] <= 'z'))) --name;
    if (strncmp(name, "chunkattn_", 10) != 0 && strncmp(name, "add()", 5) != 0) return 0;
  }
  return strstr(text, "::") == NULL && strstr(text, "range.") == NULL;
}

/* Attention over K and V of ones, which are ones. */
static int computes(void) {
  int32_t page = 1, length = 16, starts[2] = {0, 16};
  const chunkattn_tables t = {&page, 1, &length, starts, 1};
  const chunkattn_layer layer = dense_layer(16);
  const chunkattn_rows q = {rows[0], 0, 0}, out = {rows[1], 0, 0};
  for (int i = 0; i < 16 * qo_heads * dim; ++i) rows[0][i] = 1, rows[1][i] = 0;
  if (chunkattn_plan_build(plans[3], &t) || chunkattn_write_rows(attention, plans[3], &layer, &q, &q, 16) ||
      chunkattn_run_rows(attention, plans[3], &layer, NULL, &q, 16, &out, NULL))
    return 0;
  for (int i = 0; i < 16 * qo_heads * dim; ++i)
    if (!(fabsf(rows[1][i] - 1) < 0.01f)) return 0;
  return 1;
}

int main(int argc, char **argv) {
  if (argc != 3) return fprintf(stderr, "usage: %s SEED CALLS\n", argv[0]), 2;
  state = strtoull(argv[1], NULL, 10) * 2 + 1;
  const long calls = atol(argv[2]);
  for (int i = 0; i < buffer_size; ++i) tokens[i] = i < 64 ? i : below(3);
  for (int t = 0; t < 2; ++t)
    trees[t] = make_tree(1), events[t] = chunkattn_events_create(trees[t], on_event, NULL, 0);
  plans[0] = chunkattn_step_plan_create(), plans[1] = chunkattn_step_plan_create();
  plans[3] = chunkattn_plan_create(16, num_pages, below(2) - 1);
  const chunkattn_config config = {.version = CHUNKATTN_C_VERSION, .head_dim = dim, .num_qo_heads = qo_heads,
                                   .num_kv_heads = kv_heads, .kv_type = CHUNKATTN_INT8, .num_threads = 1};
  attention = chunkattn_attention_create(&config);
  if (attention == NULL || plans[3] == NULL) return fprintf(stderr, "%s\n", chunkattn_error()), 1;
  for (int i = 0; i < most_rows * qo_heads * (dim + 4); ++i) { /* any bits: NaN and infinities, too */
    const uint64_t bits = next();
    memcpy(&rows[0][i], &bits, 4), memcpy(&rows[1][i], (const char *)&bits + 4, 4);
  }
  long failures = 0, silent = 0;
  for (long i = 0; i < calls; ++i)
    if (call() != 0 && *chunkattn_error() != 0)
      ++failures, silent += !explains(chunkattn_error());
  for (int i = 0; i < many; ++i) chunkattn_sequence_destroy(sequences[i]), sequences[i] = NULL;
  for (int i = 0; i < 4; ++i) chunkattn_step_destroy(steps[i]), chunkattn_pin_destroy(pins[i]);
  for (int t = 0; t < 2; ++t) { /* and all still works */
    chunkattn_tree_stats stats;
    if (chunkattn_tree_device_idle(trees[t]) || chunkattn_tree_clear(trees[t]) ||
        chunkattn_tree_get_stats(trees[t], &stats) || stats.used_chunks != 0 ||
        chunkattn_tree_insert(trees[t], tokens, 600, NULL, &sequences[t]))
      return fprintf(stderr, "the tree does not work any more: %s\n", chunkattn_error()), 1;
    chunkattn_tree_destroy(trees[t]), chunkattn_sequence_destroy(sequences[t]), chunkattn_events_destroy(events[t]);
  }
  if (!computes()) return fprintf(stderr, "attention does not work any more: %s\n", chunkattn_error()), 1;
  for (int i = 0; i < 4; ++i) chunkattn_plan_destroy(plans[i]);
  chunkattn_attention_destroy(attention);
  printf("%ld calls, seed %s: %ld were refused, %ld without saying what was expected; %d events; attention computed "
         "%ld and stored %ld times\n", calls, argv[1], failures, silent, num_events, num_computed, num_written);
  return silent != 0 || failures < calls / 20 || num_computed < calls / 1000 || num_written < calls / 1000;
}
