// The router of router.c in Rust, with as much of tree.h as it needs bound by hand:
//     rustc router.rs -L DIRECTORY -l LIBRARY
use std::ffi::CStr;
use std::os::raw::{c_char, c_void};
use std::ptr::{null, null_mut};

const VERSION: i32 = 3;
const CHUNK_SIZE: i32 = 16;

#[repr(C)]
#[derive(Default)]
struct TreeConfig {
    version: i32,
    chunk_size: i32,
    max_chunks: i64,
    sharing: i32,
    min_run: i32,
    no_retention: i32,
    by_priority: i32,
    learns: i32,
    fair: i32,
    high_watermark: i64,
    low_watermark: i64,
    max_pinned: i64,
    ttl: i64,
}

#[repr(C)]
#[derive(Default)]
struct Row {
    sequence: u64,
    index: i32,
    position: i32,
    first_row: i32,
    num_rows: i32,
    num_drafts: i32,
    has_output: i32,
}

#[repr(C)]
#[derive(Default)]
struct Added {
    reason: i32,
    reserved: i32,
    waits_for: u64,
    blocked_index: i64,
    row: Row,
}

// Handles and structs that are only passed on: tree, sequence, step, plan, events, mirror, event.
type Handle = *mut c_void;
type Sink = extern "C" fn(context: *mut c_void, event: *const c_void, tokens: *const i32);

extern "C" {
    fn chunkattn_c_version() -> i32;
    fn chunkattn_error() -> *const c_char;
    fn chunkattn_tree_create(config: *const TreeConfig) -> Handle;
    fn chunkattn_tree_destroy(tree: Handle);
    fn chunkattn_tree_insert(tree: Handle, tokens: *const i32, n: i64, options: *const c_void, out: *mut Handle) -> i32;
    fn chunkattn_sequence_destroy(sequence: Handle);
    fn chunkattn_step_begin(tree: Handle) -> Handle;
    fn chunkattn_step_add(step: Handle, sequence: Handle, max: i64, drafts: *const i32, parents: *const i32, n: i64,
                          out: *mut Added) -> i32;
    fn chunkattn_step_build(step: Handle, plan: Handle) -> i32;
    fn chunkattn_step_finish(step: Handle) -> i32;
    fn chunkattn_step_destroy(step: Handle);
    fn chunkattn_step_plan_create() -> Handle;
    fn chunkattn_plan_destroy(plan: Handle);
    fn chunkattn_events_create(tree: Handle, sink: Sink, context: *mut c_void, stream: u64) -> Handle;
    fn chunkattn_events_destroy(events: Handle);
    fn chunkattn_mirror_create(chunk_size: i32, sharing: i32) -> Handle;
    fn chunkattn_mirror_apply(mirror: Handle, event: *const c_void, tokens: *const i32, out: *mut i32) -> i32;
    fn chunkattn_mirror_match(mirror: Handle, tokens: *const i32, n: i64, options: *const c_void) -> i64;
    fn chunkattn_mirror_destroy(mirror: Handle);
}

fn must(succeeded: bool) {
    if !succeeded {
        panic!("{}", unsafe { CStr::from_ptr(chunkattn_error()) }.to_string_lossy());
    }
}

// Nothing may unwind into the library: a failure ends the process.
extern "C" fn publish(mirror: *mut c_void, event: *const c_void, tokens: *const i32) {
    let mut result = 0;
    let failed = unsafe { chunkattn_mirror_apply(mirror, event, tokens, &mut result) };
    if failed != 0 || result != 0 {
        std::process::abort();
    }
}

struct Server {
    tree: Handle,
    mirror: Handle,
    events: Handle,
    load: i32,
}

impl Server {
    fn new() -> Server {
        let config = TreeConfig { version: VERSION, chunk_size: CHUNK_SIZE, max_chunks: 64, ..Default::default() };
        unsafe {
            let tree = chunkattn_tree_create(&config);
            must(!tree.is_null());
            let mirror = chunkattn_mirror_create(CHUNK_SIZE, 0);
            must(!mirror.is_null());
            let events = chunkattn_events_create(tree, publish, mirror, 0);
            must(!events.is_null());
            Server { tree, mirror, events, load: 0 }
        }
    }
    fn cached(&self, prompt: &[i32]) -> i64 {
        let found = unsafe { chunkattn_mirror_match(self.mirror, prompt.as_ptr(), prompt.len() as i64, null()) };
        must(found >= 0);
        found
    }
    fn serve(&mut self, prompt: &[i32]) {
        unsafe {
            let mut sequence = null_mut();
            must(chunkattn_tree_insert(self.tree, prompt.as_ptr(), prompt.len() as i64, null(), &mut sequence) == 0);
            let (step, plan) = (chunkattn_step_begin(self.tree), chunkattn_step_plan_create());
            must(!step.is_null() && !plan.is_null());
            let mut added = Added::default();
            must(chunkattn_step_add(step, sequence, 0, null(), null(), 0, &mut added) == 0);
            must(chunkattn_step_build(step, plan) == 0);
            must(chunkattn_step_finish(step) == 0);
            chunkattn_step_destroy(step);
            chunkattn_plan_destroy(plan);
            chunkattn_sequence_destroy(sequence);
        }
        self.load += 1;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        unsafe {
            chunkattn_events_destroy(self.events);
            chunkattn_mirror_destroy(self.mirror);
            chunkattn_tree_destroy(self.tree);
        }
    }
}

fn main() {
    assert_eq!(unsafe { chunkattn_c_version() }, VERSION);
    let mut servers = [Server::new(), Server::new()];
    for request in 0..12 {
        let prompt: Vec<i32> =
            (0..48).map(|i| 1000 * (request % 3) + i + if i < 40 { 0 } else { 100 * request }).collect();
        let found = [servers[0].cached(&prompt), servers[1].cached(&prompt)];
        let best = if found[0] != found[1] { found[1] > found[0] } else { servers[1].load < servers[0].load } as usize;
        println!("request {request}: {} and {} of 48 tokens are cached, so to server {best}", found[0], found[1]);
        assert!(request < 3 || found[best] >= 40);
        servers[best].serve(&prompt);
    }
}
