#include "parallel.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

namespace jaxserve {
namespace {

// Longer than the host's time between two steps: on a virtual machine it takes half a millisecond
// until a sleeping thread runs again. After the first moment a lingering thread gives way to any
// other that wants the core.
constexpr auto kLinger = std::chrono::milliseconds(2);
constexpr auto kSpin = std::chrono::microseconds(50);

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// One loop. Kept alive by every thread that may still look at it: a thread that comes late finds
// no task left, and does not touch `body`, which is gone by then.
struct Loop {
  int64_t num_tasks;
  TaskCall call;
  const void* body;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};

  void work() {
    for (;;) {
      int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= num_tasks) return;
      call(body, i);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Where lingering threads look for the newest loop.
class Board {
 public:
  // Announce a loop; returns how many threads are lingering and will see it.
  int64_t post(std::shared_ptr<Loop> loop) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      newest_ = std::move(loop);
      posted_.fetch_add(1);
    }
    return lingering_.load();
  }

  // Help with loops as they are announced, until none has come for kLinger.
  void linger(uint64_t seen) {
    lingering_.fetch_add(1);
    for (;;) {
      seen = wait_for_next(seen);
      if (posted_.load() != seen) {
        seen = help();
        continue;
      }
      // Sign off, then look again: whoever posts first counts the lingering after posting, so a
      // loop is either seen here or its owner does not count on this thread.
      lingering_.fetch_sub(1);
      if (posted_.load() == seen) return;
      lingering_.fetch_add(1);
    }
  }

  uint64_t posted() const { return posted_.load(); }

 private:
  uint64_t wait_for_next(uint64_t seen) {
    auto start = std::chrono::steady_clock::now();
    auto waited = start - start;
    do {
      for (int spin = 0; spin < 64; spin++) {
        if (posted_.load(std::memory_order_acquire) != seen) return seen;
        pause_briefly();
      }
      if (waited > kSpin) std::this_thread::yield();
      waited = std::chrono::steady_clock::now() - start;
    } while (waited < kLinger);
    return seen;
  }

  uint64_t help() {
    std::shared_ptr<Loop> loop;
    uint64_t seen;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      seen = posted_.load();
      loop = newest_;
    }
    loop->work();
    return seen;
  }

  std::mutex mutex_;
  std::shared_ptr<Loop> newest_;
  std::atomic<uint64_t> posted_{0};
  std::atomic<int64_t> lingering_{0};
};

// Never destroyed: a pool thread may linger while the process exits.
Board& board() {
  static Board* const the_board = new Board;
  return *the_board;
}

}  // namespace

void run_parallel(xla::ffi::ThreadPool& pool, int64_t num_tasks, TaskCall call, const void* body) {
  int64_t threads = pool.num_threads();
  if (threads > num_tasks) threads = num_tasks;
  if (threads <= 1) {
    for (int64_t i = 0; i < num_tasks; i++) call(body, i);
    return;
  }
  auto loop = std::make_shared<Loop>();
  loop->num_tasks = num_tasks;
  loop->call = call;
  loop->body = body;
  int64_t helpers = board().post(loop);
  for (; helpers < threads - 1; helpers++) {
    pool.Schedule([loop] {
      uint64_t seen = board().posted();
      loop->work();
      board().linger(seen);
    });
  }
  loop->work();
  for (int spins = 0; loop->done.load(std::memory_order_acquire) < num_tasks; spins++) {
    if (spins < 1 << 14) {
      pause_briefly();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace jaxserve
