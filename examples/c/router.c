/* A router in C: it follows what two servers have cached, and sends each prompt to the one that has more of it. */
#include <chunkattn/c/tree.h>
#include <stdio.h>
#include <stdlib.h>

enum { chunk_size = 16, servers = 2, prompt_length = 48 };

static void must(int failed) {
  if (failed) fprintf(stderr, "%s\n", chunkattn_error()), exit(1);
}

/* An event that a server has published. Here it is taken over at once; a server would send it over a network, as
 * bytes, to a router that begins with a snapshot. */
static void publish(void *mirror, const chunkattn_event *event, const int32_t *tokens) {
  int32_t result;
  must(chunkattn_mirror_apply(mirror, event, tokens, &result));
  must(result != CHUNKATTN_CHANGED);
}

/* Stands for a server: its tree, and what it computes. */
static void serve(chunkattn_tree *tree, const int32_t *prompt) {
  chunkattn_sequence *sequence;
  must(chunkattn_tree_insert(tree, prompt, prompt_length, NULL, &sequence));
  chunkattn_step *step = chunkattn_step_begin(tree);
  chunkattn_plan *plan = chunkattn_step_plan_create();
  must(step == NULL || plan == NULL);
  chunkattn_added added;
  must(chunkattn_step_add(step, sequence, 0, NULL, NULL, 0, &added));
  must(chunkattn_step_build(step, plan));
  must(chunkattn_step_finish(step)); /* after the kernels have run */
  chunkattn_step_destroy(step);
  chunkattn_plan_destroy(plan);
  chunkattn_sequence_destroy(sequence); /* its K/V stays cached */
}

int main(void) {
  const chunkattn_tree_config config = {.version = CHUNKATTN_C_VERSION, .chunk_size = chunk_size, .max_chunks = 64};
  chunkattn_tree *trees[servers];
  chunkattn_mirror *mirrors[servers];
  chunkattn_events *events[servers];
  for (int s = 0; s < servers; ++s) {
    must((trees[s] = chunkattn_tree_create(&config)) == NULL);
    must((mirrors[s] = chunkattn_mirror_create(chunk_size, CHUNKATTN_SHARE_TOKENS)) == NULL);
    must((events[s] = chunkattn_events_create(trees[s], publish, mirrors[s], 0)) == NULL);
  }
  int load[servers] = {0}, wrong = 0;
  for (int request = 0; request < 12; ++request) {
    int32_t prompt[prompt_length]; /* of one of three applications, whose first 40 tokens are the same each time */
    for (int i = 0; i < prompt_length; ++i) prompt[i] = 1000 * (request % 3) + i + (i < 40 ? 0 : 100 * request);
    int64_t found[servers];
    int best = load[1] < load[0];
    for (int s = 0; s < servers; ++s) {
      must((found[s] = chunkattn_mirror_match(mirrors[s], prompt, prompt_length, NULL)) < 0);
      chunkattn_match match;
      must(chunkattn_tree_match(trees[s], prompt, prompt_length, NULL, &match));
      wrong += match.cached != found[s];
    }
    if (found[0] != found[1]) best = found[1] > found[0];
    printf("request %d: %d and %d of %d tokens are cached, so to server %d\n", request, (int)found[0], (int)found[1],
           prompt_length, best);
    wrong += request >= 3 && found[best] < 40;
    serve(trees[best], prompt), ++load[best];
  }
  for (int s = 0; s < servers; ++s) {
    chunkattn_snapshot snapshot; /* for a router that comes later */
    chunkattn_mirror *late = chunkattn_mirror_create(chunk_size, CHUNKATTN_SHARE_TOKENS);
    must(late == NULL || chunkattn_events_snapshot(events[s], &snapshot));
    must(chunkattn_mirror_load(late, &snapshot));
    wrong += chunkattn_mirror_number(late) != chunkattn_mirror_number(mirrors[s]);
    chunkattn_mirror_destroy(late);
    chunkattn_events_destroy(events[s]);
    chunkattn_mirror_destroy(mirrors[s]);
    chunkattn_tree_destroy(trees[s]);
  }
  printf("the mirrors say what the trees have: %s\n", wrong == 0 ? "yes" : "NO");
  return wrong != 0;
}
