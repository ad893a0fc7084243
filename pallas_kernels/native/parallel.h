// Loops spread over XLA's own CPU thread pool: no second pool that fights it for the cores.
//
// A decode step is hundreds of loops of some ten microseconds, less than it takes to wake a thread.
// So a pool thread that has finished its part of a loop lingers a moment for the next loop before
// it goes back to the pool (kLinger); within a step the threads stay together, between steps and
// when nothing runs they sleep.
#pragma once

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

typedef void (*TaskCall)(const void* body, int64_t index);

// parallel_for without the template; see there.
void run_parallel(xla::ffi::ThreadPool& pool, int64_t num_tasks, TaskCall call, const void* body);

// Run task(i) for 0 <= i < num_tasks, each once, in no fixed order; returns when all have run.
// The caller works too and waits only for tasks that a worker has already begun, so it cannot
// deadlock when every thread of the pool is busy or blocked here itself.
template <class Task>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t num_tasks, const Task& task) {
  TaskCall call = [](const void* body, int64_t i) { (*static_cast<const Task*>(body))(i); };
  run_parallel(pool, num_tasks, call, &task);
}

}  // namespace jaxserve
