// Loops spread over XLA's own CPU thread pool: no second pool that fights it for the cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// What the workers of one loop share. Kept alive by every worker, because a scheduled worker may
// start after the loop has ended: it then finds no task left and touches nothing else.
struct LoopState {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
};

// Run task(i) for 0 <= i < num_tasks, each once, in no fixed order; returns when all have run.
// The caller works too and waits only for tasks that a worker has already begun, so it cannot
// deadlock when every thread of the pool is busy or blocked here itself.
template <class Task>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t num_tasks, const Task& task) {
  int64_t workers = pool.num_threads();
  if (workers > num_tasks) workers = num_tasks;
  if (workers <= 1) {
    for (int64_t i = 0; i < num_tasks; i++) task(i);
    return;
  }
  auto state = std::make_shared<LoopState>();
  const Task* body = &task;
  auto work = [state, num_tasks, body] {
    for (;;) {
      int64_t i = state->next.fetch_add(1, std::memory_order_relaxed);
      if (i >= num_tasks) return;
      (*body)(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t w = 1; w < workers; w++) pool.Schedule([work] { work(); });
  work();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < num_tasks; spins++) {
    if (spins < 4096) {
      pause_briefly();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace jaxserve
