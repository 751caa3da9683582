#include "tests/simulation/sim_world.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace sluice {

void World::Log(const std::string& text) {
  if (trace_) std::printf("%9.3f ms  %s\n", absl::ToDoubleMilliseconds(now_ - absl::UnixEpoch()), text.c_str());
}

void World::After(absl::Duration delay, const LifeRef& life, std::function<void()> what) {
  queue_.push({now_ + delay, ++sequence_, life, std::move(what)});
}

bool World::Step() {
  if (queue_.empty()) return false;
  Event event = queue_.top();
  queue_.pop();
  now_ = event.at;
  ++events_;
  if (event.life == nullptr || event.life->up) event.what();
  return true;
}

void Link::Send(absl::Time* next, const LifeRef& to, std::function<void()> deliver) {
  if (!open_) return;
  *next = std::max({*next, world_->now() + world_->Delay(), frozen_until_});
  world_->After(*next - world_->now(), to, [self = shared_from_this(), deliver = std::move(deliver)] {
    if (self->open_ || self->deliver_rest_) deliver();
  });
}

void Link::Break(bool graceful) {
  if (!open_) return;
  open_ = false;
  deliver_rest_ = graceful;
  // A close comes after what was delivered in order, on each end by itself.
  world_->After(std::max(next_a_ - world_->now(), world_->Delay()), a_, [self = shared_from_this()] {
    if (const auto closed = std::exchange(self->on_a_closed, nullptr)) closed();
  });
  world_->After(std::max(next_b_ - world_->now(), world_->Delay()), b_, [self = shared_from_this()] {
    if (const auto closed = std::exchange(self->on_b_closed, nullptr)) closed();
  });
}

}  // namespace sluice
