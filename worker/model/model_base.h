// What all models share: host images of parameters and gradients with their device memory, the copies between them, and
// the delivery of finished gradients while the backward pass goes on.
//
// The space is cut into blocks (a layer, the embedding): the unit of upload and of `ready`.
#ifndef SLUICE_WORKER_MODEL_MODEL_BASE_H_
#define SLUICE_WORKER_MODEL_MODEL_BASE_H_

#include <deque>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "worker/model/model.h"

namespace sluice {

// An array of floats in host memory with its twin on the device; one memory where kernels compute in the host's.
class Image {
 public:
  static absl::StatusOr<Image> Make(Backend* backend, int64_t floats);
  // In memory that servers of this host may map, where the system has such.
  static absl::StatusOr<Image> MakeShared(Backend* backend, int64_t floats);
  // With windows onto servers' memory, where kernels compute in the host's and the system has such.
  static absl::StatusOr<Image> MakeWindows(Backend* backend, int64_t floats);

  float* host() const { return static_cast<float*>(host_.get()); }
  std::shared_ptr<const void> owner() const { return host_; }
  Floats device(int64_t first = 0) const { return {device_.get(), first}; }
  // In the window of this version, where there are windows.
  Floats device_at(uint64_t version, int64_t first) const {
    return {(version % 2 == 0 ? device_ : odd_device_).get(), first};
  }
  ParameterMemory* windows() const { return windows_.get(); }  // null: none
  bool one_memory() const { return one_memory_; }
  const std::shared_ptr<const SharedRegion>& region() const { return region_; }  // null: not shared

 private:
  static absl::StatusOr<Image> Over(Backend* backend, std::shared_ptr<void> host, int64_t floats);

  std::shared_ptr<const SharedRegion> region_;
  std::shared_ptr<void> host_;
  std::shared_ptr<ParameterMemory> windows_;
  std::shared_ptr<Buffer> device_, odd_device_;  // the same one without windows
  bool one_memory_ = false;
};

// Cuts one allocation into views, each 64-byte aligned. First pass without a buffer: only counts.
class Arena {
 public:
  explicit Arena(Buffer* buffer) : buffer_(buffer) {}
  Floats Take(int64_t floats) {
    const Floats view = {buffer_, taken_};
    taken_ += (floats + 15) / 16 * 16;
    return view;
  }
  int64_t bytes() const { return taken_ * static_cast<int64_t>(sizeof(float)); }

 private:
  Buffer* const buffer_;
  int64_t taken_ = 0;
};

class ModelBase : public Model {
 public:
  const ParameterSpace& space() const override { return space_; }
  float* parameters() override { return parameters_.host(); }
  ParameterMemory* parameter_memory() override { return parameters_.windows(); }
  void UseVersion(uint64_t version) override { version_ = version; }
  const float* gradients() const override { return gradients_.host(); }
  std::shared_ptr<const void> gradient_owner() const override { return gradients_.owner(); }
  std::shared_ptr<const SharedRegion> gradient_region() const override { return gradients_.region(); }
  absl::StatusOr<LossSum> ForwardBackward(const std::vector<Batch>& microbatches, const ParameterGate& needed,
                                          const GradientSink& ready, const std::atomic<bool>* cancel) override;
  absl::StatusOr<LossSum> Evaluate(const Batch& batch, const std::atomic<bool>* cancel) override;
  absl::Status Meet() override;
  // Any thread, also during a pass (whose own parameters it does not change where the device has memory of its own).
  void ParametersChanged(Range range) override ABSL_LOCKS_EXCLUDED(mutex_);

 protected:
  // `view`: what the part's rank holds of the space.
  ModelBase(Backend* backend, ParameterSpace space, std::vector<Range> view, const ModelPart& part)
      : part_(part), backend_(backend), space_(std::move(space)), view_(std::move(view)) {}
  ~ModelBase() override;

  // Allocates; `blocks` in the order of the space, together all of it.
  absl::Status Init(std::vector<Range> blocks);

  // What a model does with one microbatch; activations of `slot` are kept from the forward to the backward pass.
  virtual absl::Status Check(const Batch& batch, int64_t* count) const = 0;  // count: of targets
  virtual int64_t Positions(const Batch& batch) const = 0;                   // rows of its activations
  virtual absl::Status Reserve(int64_t positions, size_t slots) = 0;         // at least; grows only
  virtual absl::Status Forward(size_t slot, const Batch& batch, bool gradient, const std::atomic<bool>* cancel) = 0;
  // `first`, `last`: of the pass.
  virtual absl::Status Backward(size_t slot, const Batch& batch, bool first, bool last, const GradientSink& ready,
                                const std::atomic<bool>* cancel) = 0;

  // Brackets of a pass: the end waits for all that was enqueued (always, also after an error) and returns the sums.
  // `needed` outlives the pass.
  void BeginPass(const ParameterGate* needed);
  absl::StatusOr<LossSum> EndPass(absl::Status status);

  // Forward: before the use of the block's parameters; waits at the gate and brings what has changed to the device.
  // CANCELLED where the caller wants to stop.
  absl::Status Enter(size_t block, const std::atomic<bool>* cancel) ABSL_LOCKS_EXCLUDED(mutex_);
  // Backward, first microbatch: zeros for tensors of one dimension; the others are overwritten by their product.
  void ClearVectors(size_t block);
  // Backward, last microbatch: the block's gradients are complete in the stream's order. Calls `ready` for what has
  // arrived, and waits until at most `behind` blocks are under way.
  absl::Status Leave(size_t block, const GradientSink& ready, size_t behind);
  // Waits until no more than `behind` are under way.
  absl::Status Deliver(const GradientSink& ready, size_t behind);

  // Array of the device that other ranks' arrays are added to, or that goes to or comes from another rank: staged in
  // host memory where it does not lie there. Wait for what the stream has to do before.
  absl::Status SumOverRanks(Collectives& ranks, Floats x, int64_t n);
  // Own part, of whole rows, in place; see Collectives::ReduceScatter.
  absl::Status ScatterSumOverRanks(Collectives& ranks, Floats x, int64_t n, int64_t row);
  absl::Status GatherFromRanks(Collectives& ranks, Floats x, int64_t n, int64_t row);
  absl::Status SendTo(PeerGroup& ranks, uint32_t rank, Floats x, int64_t n);
  absl::Status ReceiveFrom(PeerGroup& ranks, uint32_t rank, Floats x, int64_t n);

  Floats parameter(uint64_t element) const { return parameters_.device_at(version_, static_cast<int64_t>(element)); }
  Floats gradient(uint64_t element) const { return gradients_.device(static_cast<int64_t>(element)); }
  uint64_t version() const { return version_; }
  View<double> sums() const { return {sums_.get(), 0}; }
  Stream& stream() { return *compute_; }
  const ModelPart& part() const { return part_; }
  Backend& backend() { return *backend_; }

 private:
  struct Arrival {
    size_t block;
    std::shared_ptr<Event> event;
  };

  // Calls exchange(span) with the array's values in host memory and keeps what it leaves there.
  template <typename Exchange>
  absl::Status InHost(Floats x, int64_t n, bool read, bool write, Exchange exchange);

  absl::Status Steps(const std::vector<const Batch*>& batches, uint32_t slots, const GradientSink& ready,
                     const std::atomic<bool>* cancel);

  const ModelPart part_;
  Backend* const backend_;
  const ParameterSpace space_;
  const std::vector<Range> view_;
  std::vector<Range> blocks_;               // constant after Init
  std::vector<std::vector<Range>> pieces_;  // of each block what this rank holds; constant after Init
  Image parameters_, gradients_;
  uint64_t version_ = 0;          // of the parameters that passes compute from
  std::shared_ptr<Buffer> sums_;  // 3 doubles
  std::unique_ptr<Stream> compute_, copy_;
  const ParameterGate* needed_ = nullptr;  // of the pass under way
  std::vector<bool> entered_;              // by block, in this pass: behind the gate
  std::deque<Arrival> arrivals_;           // gradients on their way to the host, oldest first
  std::shared_ptr<void> staging_;          // host memory of arrays between ranks
  int64_t staging_floats_ = 0;
  absl::Mutex mutex_;
  std::vector<std::vector<Range>> changed_ ABSL_GUARDED_BY(mutex_);  // by block, not on the device yet
};

// CANCELLED when *cancel (which may be nullptr) is set.
absl::Status CheckCancel(const std::atomic<bool>* cancel);

absl::StatusOr<std::unique_ptr<Model>> MakeGpt2(const v1::ModelSpec& spec, ParameterSpace space, Backend* backend,
                                                const ModelPart& part);
// Of model.mlp, model.softmax, model.logistic.
absl::StatusOr<std::unique_ptr<Model>> MakeClassifier(const v1::ModelSpec& spec, ParameterSpace space, Backend* backend,
                                                      const ModelPart& part);

}  // namespace sluice

#endif  // SLUICE_WORKER_MODEL_MODEL_BASE_H_
