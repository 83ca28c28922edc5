/* hostile SEED CALLS: random calls of the tree with arguments that are null, misaligned, huge, negative, of another
 * tree, in the wrong order and after the tree is gone. Whatever they return, a sanitizer has nothing to report, each
 * failure has a text that names what was expected as the header does, and a tree that was called so still works. */
#include <chunkattn/c/tree.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { many = 24, buffer_size = 4096 };

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
static chunkattn_plan *plans[3];
static chunkattn_events *events[2];
static chunkattn_mirror *mirror;
static _Alignas(8) char memory[buffer_size * sizeof(int64_t) + 8];
static int32_t tokens[buffer_size];

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
  switch (below(43)) {
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
    case 32: return chunkattn_step_build(steps[st], plans[below(3)]);
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

int main(int argc, char **argv) {
  if (argc != 3) return fprintf(stderr, "usage: %s SEED CALLS\n", argv[0]), 2;
  state = strtoull(argv[1], NULL, 10) * 2 + 1;
  const long calls = atol(argv[2]);
  for (int i = 0; i < buffer_size; ++i) tokens[i] = i < 64 ? i : below(3);
  for (int t = 0; t < 2; ++t)
    trees[t] = make_tree(1), events[t] = chunkattn_events_create(trees[t], on_event, NULL, 0);
  plans[0] = chunkattn_step_plan_create(), plans[1] = chunkattn_step_plan_create();
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
  for (int i = 0; i < 3; ++i) chunkattn_plan_destroy(plans[i]);
  printf("%ld calls, seed %s: %ld were refused, %ld without saying what was expected; %d events\n", calls, argv[1],
         failures, silent, num_events);
  return silent != 0 || failures < calls / 20;
}
