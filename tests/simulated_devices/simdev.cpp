// A simulated accelerator with several devices, in host memory: PyTorch's PrivateUse1 backend with counters.
//
// It exists to prove claims about devices ("no byte and no context on any other device") on a machine that has none.
// So where the rules of real hardware decide the answer, it keeps CUDA's rules:
//   * the current device belongs to a thread: a new thread starts on device 0;
//   * a context comes into being on a device's first use, and an unused device has none;
//   * pinned host memory belongs to some context: the first pinned block makes one on the current device;
//   * tensors of two devices do not mix in one operation, except for a 0-dim tensor on the CPU;
//   * an allocation beyond the device's memory fails, and leaves everything as it was.
// The arithmetic is done by PyTorch's CPU kernels, on copies in ordinary host memory that no counter sees.
// So results equal the CPU's bit for bit, and a device's counters hold tensors only, never a kernel's scratch.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_foreach_copy_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
// instead of torch/extension.h, whose other headers take a third of the build
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include <sys/prctl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr DeviceType kSim = DeviceType::PrivateUse1;
constexpr int64_t kDefaultLimit = int64_t{64} << 30;
constexpr size_t kAlignment = 64;

// ---------------------------------------------------------------------------------------------------------------------
// The devices: everything that is counted, behind one lock.
// ---------------------------------------------------------------------------------------------------------------------

struct Counters {
  bool context = false;
  int64_t live = 0;  // bytes in living blocks
  int64_t peak = 0;  // the most that `live` has been
  int64_t limit = kDefaultLimit;
  int64_t allocations = 0;  // blocks handed out
  int64_t failures = 0;     // allocations refused for want of memory
  int64_t allocated = 0;    // bytes ever handed out
  int64_t from_host = 0;    // bytes copied from the host to this device
  int64_t to_host = 0;      // bytes copied from this device to the host
  int64_t from_peer = 0;    // bytes copied from another device to this one
  int64_t within = 0;       // bytes copied from this device to itself
};

struct Block {
  int device;
  size_t bytes;
};

int device_count() {
  static const int count = [] {
    const char* text = std::getenv("SIMDEV_COUNT");
    const int wanted = text ? std::atoi(text) : 8;
    TORCH_CHECK(wanted >= 0 && wanted <= 64, "simulated devices: SIMDEV_COUNT=", text, " is not a number from 0 to 64");
    return wanted;
  }();
  return count;
}

void check_ordinal(int64_t device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "simulated devices: invalid device ordinal ", device,
              ", there are ", device_count());
}

class Devices {
 public:
  // Never destroyed: tensors that outlive main() still hand back their blocks.
  static Devices& instance() {
    static Devices* devices = new Devices();
    return *devices;
  }

  void touch(int device, const std::string& why) {
    std::lock_guard<std::mutex> guard(mutex_);
    touch_locked(device, why);
  }

  bool has_context(int device) {
    std::lock_guard<std::mutex> guard(mutex_);
    return device >= 0 && device < device_count() && counters_[device].context;
  }

  void* allocate(int device, size_t bytes) {
    if (bytes == 0) {
      return nullptr;
    }
    std::lock_guard<std::mutex> guard(mutex_);
    touch_locked(device, "allocation of " + std::to_string(bytes) + " bytes");
    Counters& counters = counters_[device];
    if (static_cast<int64_t>(bytes) > counters.limit - counters.live) {
      counters.failures += 1;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated device npu:", device, " out of memory: tried to allocate ",
                       bytes, " bytes, ", counters.live, " are in use, the limit is ", counters.limit);
    }
    void* pointer = nullptr;
    if (posix_memalign(&pointer, kAlignment, bytes) != 0) {
      counters.failures += 1;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated device npu:", device, ": the host has no memory for ", bytes,
                       " bytes");
    }
    blocks_[reinterpret_cast<uintptr_t>(pointer)] = Block{device, bytes};
    counters.live += static_cast<int64_t>(bytes);
    counters.peak = std::max(counters.peak, counters.live);
    counters.allocations += 1;
    counters.allocated += static_cast<int64_t>(bytes);
    return pointer;
  }

  void release(void* pointer) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = blocks_.find(reinterpret_cast<uintptr_t>(pointer));
    if (found != blocks_.end()) {
      counters_[found->second.device].live -= static_cast<int64_t>(found->second.bytes);
      blocks_.erase(found);
    }
    std::free(pointer);
  }

  void* allocate_pinned(int current, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    const bool any = std::any_of(counters_.begin(), counters_.end(), [](const Counters& c) { return c.context; });
    if (!any) {
      touch_locked(current, "pinned memory before any context");
    }
    void* pointer = nullptr;
    if (bytes != 0) {
      TORCH_CHECK(posix_memalign(&pointer, kAlignment, bytes) == 0, "the host has no memory for ", bytes,
                  " pinned bytes");
      pinned_[reinterpret_cast<uintptr_t>(pointer)] = bytes;
    }
    return pointer;
  }

  void release_pinned(void* pointer) {
    std::lock_guard<std::mutex> guard(mutex_);
    pinned_.erase(reinterpret_cast<uintptr_t>(pointer));
    std::free(pointer);
  }

  bool is_pinned(const void* pointer) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    auto next = pinned_.upper_bound(address);
    return next != pinned_.begin() && address < (--next)->first + next->second;
  }

  int device_of(const void* pointer) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    auto next = blocks_.upper_bound(address);
    const bool inside = next != blocks_.begin() && address < (--next)->first + next->second.bytes;
    TORCH_CHECK(inside, "simulated devices: this pointer is in no device's memory");
    return next->second.device;
  }

  // `from` and `to` are device numbers, -1 is the host.
  void count_copy(int from, int to, int64_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (from < 0) {
      counters_[to].from_host += bytes;
    } else if (to < 0) {
      counters_[from].to_host += bytes;
    } else if (from != to) {
      counters_[to].from_peer += bytes;
    } else {
      counters_[to].within += bytes;
    }
  }

  Counters counters(int device) {
    check_ordinal(device);
    std::lock_guard<std::mutex> guard(mutex_);
    return counters_[device];
  }

  void set_limit(int device, int64_t bytes) {
    check_ordinal(device);
    TORCH_CHECK(bytes >= 0, "simulated devices: a limit of ", bytes, " bytes is below zero");
    std::lock_guard<std::mutex> guard(mutex_);
    counters_[device].limit = bytes;
  }

  void reset_peak(int device) {
    check_ordinal(device);
    std::lock_guard<std::mutex> guard(mutex_);
    counters_[device].peak = counters_[device].live;
  }

  // Forgets the past. What is alive stays counted, and a limit stays set.
  void reset() {
    std::lock_guard<std::mutex> guard(mutex_);
    for (Counters& counters : counters_) {
      Counters fresh;
      fresh.live = counters.live;
      fresh.peak = counters.live;
      fresh.limit = counters.limit;
      counters = fresh;
    }
    log_.clear();
  }

  std::vector<std::pair<int, std::string>> log() {
    std::lock_guard<std::mutex> guard(mutex_);
    return log_;
  }

 private:
  Devices() : counters_(static_cast<size_t>(device_count())) {
    read_limits();
  }

  // SIMDEV_LIMIT="0=1000000,3=2000000": bytes by device.
  void read_limits() {
    const char* text = std::getenv("SIMDEV_LIMIT");
    std::istringstream entries(text ? text : "");
    for (std::string entry; std::getline(entries, entry, ',');) {
      int device = -1;
      char equals = 0;
      int64_t bytes = -1;
      std::istringstream fields(entry);
      fields >> device >> equals >> bytes;
      TORCH_CHECK(!fields.fail() && equals == '=' && bytes >= 0, "simulated devices: SIMDEV_LIMIT has '", entry,
                  "', wanted DEVICE=BYTES");
      check_ordinal(device);
      counters_[device].limit = bytes;
    }
  }

  void touch_locked(int device, const std::string& why) {
    check_ordinal(device);
    if (!counters_[device].context) {
      counters_[device].context = true;
      log_.emplace_back(device, why);
    }
  }

  std::mutex mutex_;
  std::vector<Counters> counters_;
  std::map<uintptr_t, Block> blocks_;  // ordered, so that a pointer into a block finds it
  std::map<uintptr_t, size_t> pinned_;
  std::vector<std::pair<int, std::string>> log_;
};

// ---------------------------------------------------------------------------------------------------------------------
// The current device, one for each thread.
// ---------------------------------------------------------------------------------------------------------------------

thread_local int current_device = 0;

// A switch to another device makes its context, as cudaSetDevice does since CUDA 12.
void switch_device(int64_t device, const char* why) {
  check_ordinal(device);
  if (device != current_device) {
    Devices::instance().touch(static_cast<int>(device), why);
  }
  current_device = static_cast<int>(device);
}

// The way back from a guard: never makes a context, never throws.
void restore_device(int64_t device) noexcept {
  if (device >= 0 && device < device_count()) {
    current_device = static_cast<int>(device);
  }
}

// Autograd starts one thread for each device and sets its device at once. With CUDA it asks first whether the device
// has a context; for PrivateUse1 it does not ask, so this does. The thread's name is all that tells.
bool on_autograd_thread() {
  char name[16] = {};
  prctl(PR_GET_NAME, name);
  return std::strncmp(name, "pt_autograd_", 12) == 0;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = kSim;

  DeviceType type() const override {
    return kSim;
  }
  Device exchangeDevice(Device device) const override {
    const Device before(kSim, static_cast<DeviceIndex>(current_device));
    if (device.has_index()) {
      switch_device(device.index(), "device guard");
    }
    return before;
  }
  Device getDevice() const override {
    return Device(kSim, static_cast<DeviceIndex>(current_device));
  }
  void setDevice(Device device) const override {
    if (!device.has_index()) {
      return;
    }
    check_ordinal(device.index());
    if (!on_autograd_thread()) {
      Devices::instance().touch(device.index(), "set device");
    }
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    restore_device(device.index());
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(device_count());
  }

  // One stream for each device, on which everything is finished before the call returns.
  c10::Stream getStream(Device device) const noexcept override {
    const auto index = static_cast<DeviceIndex>(device.has_index() ? device.index() : current_device);
    return c10::Stream(c10::Stream::DEFAULT, Device(kSim, index));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(Device device, int) const override {
    return getStream(device);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---------------------------------------------------------------------------------------------------------------------
// Memory.
// ---------------------------------------------------------------------------------------------------------------------

// SIMDEV_POISON=1 fills fresh blocks with 0xFF (NaN for floats): memory that nobody wrote then shows.
bool poison() {
  static const bool wanted =
      std::getenv("SIMDEV_POISON") != nullptr && std::string(std::getenv("SIMDEV_POISON")) == "1";
  return wanted;
}

void release_block(void* pointer) {
  if (pointer != nullptr) {
    Devices::instance().release(pointer);
  }
}

void release_pinned_block(void* pointer) {
  if (pointer != nullptr) {
    Devices::instance().release_pinned(pointer);
  }
}

// A DeviceAllocator, and not a plain Allocator, so that torch.accelerator.memory_allocated() and its like work.
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = Devices::instance().allocate(current_device, bytes);
    if (pointer != nullptr && poison()) {
      std::memset(pointer, 0xFF, bytes);
    }
    return {pointer, pointer, &release_block, Device(kSim, static_cast<DeviceIndex>(current_device))};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_block;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const Counters counters = Devices::instance().counters(device);
    c10::CachingAllocator::Stat bytes;
    bytes.current = counters.live;
    bytes.peak = counters.peak;
    bytes.allocated = counters.allocated;
    bytes.freed = counters.allocated - counters.live;
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[all] = bytes;
    stats.active_bytes[all] = bytes;
    stats.requested_bytes[all] = bytes;
    stats.reserved_bytes[all] = bytes;
    stats.num_ooms = counters.failures;
    stats.num_device_alloc = counters.allocations;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    Devices::instance().reset_peak(device);
  }
  // The driver's answer needs a context, on hardware too.
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    Devices::instance().touch(device, "mem_get_info");
    const Counters counters = Devices::instance().counters(device);
    return {static_cast<size_t>(std::max<int64_t>(0, counters.limit - counters.live)),
            static_cast<size_t>(counters.limit)};
  }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = Devices::instance().allocate_pinned(current_device, bytes);
    return {pointer, pointer, &release_pinned_block, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_pinned_block;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

// Leaked, for the same reason as Devices.
DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory();
  return *memory;
}

PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory();
  return *memory;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  // The CPU kernels draw from the CPU's generator, so that is the generator of every device.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static const at::Generator generator = at::globalContext().defaultGenerator(Device(DeviceType::CPU));
    return generator;
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return getDefaultGenerator(0).clone();
  }
  Device getDeviceFromPtr(void* pointer) const override {
    return Device(kSim, static_cast<DeviceIndex>(Devices::instance().device_of(pointer)));
  }
  bool isPinnedPtr(const void* pointer) const override {
    return Devices::instance().is_pinned(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }
  bool hasPrimaryContext(DeviceIndex device) const override {
    return Devices::instance().has_context(device);
  }
  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(device_count());
  }
  void setCurrentDevice(DeviceIndex device) const override {
    Devices::instance().touch(device, "set device");
    current_device = device;
  }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(current_device);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = static_cast<DeviceIndex>(current_device);
    switch_device(device, "device guard");
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    const auto before = static_cast<DeviceIndex>(current_device);
    restore_device(device);
    return before;
  }
  // UntypedStorage.resize_. The old block lives until the new one is filled, as on hardware; if the new one is refused,
  // the storage is as it was.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(impl->device());
    c10::DataPtr fresh = device_memory().allocate(bytes);
    const size_t kept = std::min(bytes, impl->nbytes());
    if (kept != 0) {
      std::memcpy(fresh.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

Hooks& hooks() {
  static auto* instance = new Hooks();
  return *instance;
}

[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(kSim, &device_memory());
  at::RegisterPrivateUse1HooksInterface(&hooks());
  return true;
}();

// ---------------------------------------------------------------------------------------------------------------------
// The operations that know what a device is. All others fall back to the CPU's, below.
// ---------------------------------------------------------------------------------------------------------------------

// How many fallbacks this thread is inside: their copies to and from the host are the simulation's, not the program's.
thread_local int fallback_depth = 0;

struct InFallback {
  InFallback() {
    fallback_depth += 1;
  }
  ~InFallback() {
    fallback_depth -= 1;
  }
  InFallback(const InFallback&) = delete;
  InFallback& operator=(const InFallback&) = delete;
};

int number_of(const Tensor& tensor) {
  return tensor.is_privateuseone() ? tensor.device().index() : -1;
}

// The same memory seen as a CPU tensor.
Tensor host_alias(const Tensor& tensor) {
  if (tensor.is_cpu()) {
    return tensor;
  }
  void* data = const_cast<void*>(tensor.const_data_ptr());
  Tensor alias =
      at::from_blob(data, tensor.sizes(), tensor.strides(), [](void*) {}, at::TensorOptions().dtype(tensor.dtype()));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

Device resolve(std::optional<Device> device) {
  const bool given = device.has_value() && device->has_index();
  return Device(kSim, given ? device->index() : static_cast<DeviceIndex>(current_device));
}

Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(resolve(device));
  return at::detail::empty_generic(size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   at::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(resolve(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype));
}

// Every copy that has a device at one end. A change of dtype happens on the host, so the device's dtype is what moves.
Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  host_alias(target).copy_(host_alias(source).expand(target.sizes()));
  if (fallback_depth == 0) {
    const Tensor& on_device = target.is_privateuseone() ? target : source;
    const auto bytes = target.numel() * static_cast<int64_t>(on_device.element_size());
    Devices::instance().count_copy(number_of(source), number_of(target), bytes);
  }
  return target;
}

// How a fallback writes its result into an `out=` or in-place argument.
Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) {
    target.resize_(source.sizes());
  }
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  if (fallback_depth == 0) {
    Devices::instance().count_copy(number_of(tensor), -1, static_cast<int64_t>(tensor.element_size()));
  }
  return host_alias(tensor).item();
}

// PyTorch sets the new shape first and asks for the memory then. A refusal must leave no shape without memory behind.
const Tensor& resize(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(tensor.device());
  const std::vector<int64_t> old_size = tensor.sizes().vec();
  const std::vector<int64_t> old_stride = tensor.strides().vec();
  try {
    return at::native::resize_(tensor, size, format);
  } catch (...) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(old_size, old_stride);
    throw;
  }
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  const c10::DeviceGuard guard(tensor.device());
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, size, stride);
}

Tensor& set_whole_storage(Tensor& tensor, at::Storage storage) {
  return at::native::set_(tensor, std::move(storage));
}

Tensor& set_to_nothing(Tensor& tensor) {
  const c10::DeviceGuard guard(tensor.device());
  const at::Storage nothing(at::Storage::use_byte_size_t(), 0, &device_memory(), /*resizable=*/true);
  return tensor.set_(nothing, 0, {0}, {});
}

// One copy for each pair, which is what hardware does as well when the two lists are not alike.
void foreach_copy(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  at::native::foreach_tensor_copy_list_kernel_slow_(targets, sources, non_blocking);
}

void record_stream(Tensor&, c10::Stream) {}

// Attention. Without this PyTorch would choose other kernels for the device than for the CPU, with other roundings. So
// the CPU is asked what it would choose, and its fused kernel runs through the fallback.
int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  std::optional<Tensor> host_mask;
  if (mask.has_value() && mask->defined()) {
    host_mask = host_alias(*mask);
    host_mask->set_requires_grad(mask->requires_grad() && at::GradMode::is_enabled());
  }
  const int64_t choice = at::_fused_sdp_choice(host_alias(query), host_alias(key), host_alias(value), host_mask,
                                               dropout, is_causal, scale, enable_gqa);
  const bool fused = choice == static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  return static_cast<int64_t>(fused ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math);
}

using Attention = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

Attention attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                    double dropout, bool is_causal, bool, std::optional<double> scale) {
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, mask, scale);
  return {output, logsumexp, Tensor(), Tensor(), query.sym_size(2), key.sym_size(2), Tensor(), Tensor(), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
    std::array<bool, 4>, const Tensor& output, const Tensor& logsumexp, const Tensor&, const Tensor&, c10::SymInt,
    c10::SymInt, double dropout, bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  const std::optional<Tensor> given = mask.defined() ? std::optional<Tensor>(mask) : std::nullopt;
  auto [d_query, d_key, d_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, key, value, output, logsumexp, dropout, is_causal, given, scale);
  return {d_query, d_key, d_value, Tensor()};
}

}  // namespace

// REGISTER_PRIVATEUSE1_DISPATCH names what stands in at::native.
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_choice)
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// The fallback: inputs are copied to the host, the CPU's kernel runs, results are copied to the inputs' device.
// ---------------------------------------------------------------------------------------------------------------------

// Operations that take tensors of the CPU beside a device's on hardware too: indices, and lengths.
bool mixes_with_cpu(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::index",
      "aten::index_put_",
      "aten::index_put",
      "aten::_index_put_impl_",
      "aten::_unsafe_index",
      "aten::_unsafe_index_put",
      "aten::_pack_padded_sequence",
      "aten::_ctc_loss",
  };
  return names.count(name) != 0;
}

void append_tensors(const c10::IValue& value, std::vector<Tensor>& tensors) {
  const auto append = [&tensors](const Tensor& tensor) {
    if (tensor.defined()) {
      tensors.push_back(tensor);
    }
  };
  if (value.isTensor()) {
    append(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) {
      append(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor.has_value()) {
        append(*tensor);
      }
    }
  }
}

// The one device among the arguments; two are an error, in the words of CUDA's own.
std::optional<Device> common_device(const std::string& name, const std::vector<Tensor>& tensors) {
  std::optional<Device> common;
  for (const Tensor& tensor : tensors) {
    if (tensor.is_privateuseone()) {
      TORCH_CHECK(!common.has_value() || *common == tensor.device(),
                  "Expected all tensors to be on the same device, but found at least two devices, ", *common, " and ",
                  tensor.device(), "! (when checking arguments for ", name, ")");
      common = tensor.device();
    }
  }
  if (common.has_value() && !mixes_with_cpu(name)) {
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(!tensor.is_cpu() || tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but found at least two devices, ", *common,
                  " and cpu! (when checking arguments for ", name, ")");
    }
  }
  return common;
}

// PyTorch's fallback puts a result on the first argument's device. When that is a 0-dim tensor of the CPU, hardware
// puts it on the device of the others, and so does this.
void move_results(const c10::OperatorHandle& op, torch::jit::Stack* stack, Device device) {
  const auto& returns = op.schema().returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    c10::IValue& value = (*stack)[stack->size() - returns.size() + i];
    if (returns[i].alias_info() == nullptr && value.isTensor() && value.toTensor().defined() &&
        value.toTensor().is_cpu()) {
      value = c10::IValue(value.toTensor().to(device));
    }
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<Tensor> tensors;
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = stack->size() - arguments; i < stack->size(); ++i) {
    append_tensors((*stack)[i], tensors);
  }
  const std::optional<Device> device = common_device(op.schema().name(), tensors);
  tensors.clear();
  const InFallback inside;
  at::native::cpu_fallback(op, stack);
  if (device.has_value()) {
    move_results(op, stack, *device);
  }
}

// CUDA counts whole numbers, the CPU does not; experts' tokens are counted so.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  const Tensor counted = at::histc(host_alias(self).to(at::kFloat), bins, least, most);
  return counted.to(self.scalar_type()).to(self.device());
}

// PyTorch asks a device of its own for these two by name.
std::optional<Tensor> host_alias_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? std::optional<Tensor>(host_alias(*tensor)) : std::nullopt;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                   at::IntArrayRef output_padding, int64_t groups) {
  common_device("aten::convolution", {input, weight});
  const InFallback inside;
  return at::convolution(host_alias(input), host_alias(weight), host_alias_of(bias), stride, padding, dilation,
                         transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, at::IntArrayRef stride,
                                                        at::IntArrayRef padding, at::IntArrayRef dilation,
                                                        bool transposed, at::IntArrayRef output_padding,
                                                        int64_t groups, std::array<bool, 3> wanted) {
  common_device("aten::convolution_backward", {gradient, input, weight});
  const InFallback inside;
  auto [d_input, d_weight, d_bias] = at::convolution_backward(
      host_alias(gradient), host_alias(input), host_alias(weight), at::IntArrayRef({weight.size(transposed ? 1 : 0)}),
      stride, padding, dilation, transposed, output_padding, groups, wanted);
  const auto there = [&input](const Tensor& tensor) { return tensor.defined() ? tensor.to(input.device()) : tensor; };
  return {there(d_input), there(d_weight), there(d_bias)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  // PyTorch has these in parts as well, which would go before the fallback: other roundings, and more memory.
  for (const char* name : {"native_layer_norm", "native_group_norm", "mish_backward", "silu_backward", "addr"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  library.impl("histc", histc);
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_", set_to_nothing);
  library.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  library.impl("_foreach_copy_", foreach_copy);
  library.impl("record_stream", record_stream);
  // Views: the fallback would return copies.
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("is_set_to", at::native::is_set_to);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// A copy honors the conj and neg bits itself. Resolving them first would be a copy again, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

py::dict stats_of(int device) {
  const Counters counters = Devices::instance().counters(device);
  py::dict stats;
  stats["context"] = counters.context;
  stats["live"] = counters.live;
  stats["peak"] = counters.peak;
  stats["limit"] = counters.limit;
  stats["allocations"] = counters.allocations;
  stats["failures"] = counters.failures;
  stats["from_host"] = counters.from_host;
  stats["to_host"] = counters.to_host;
  stats["from_peer"] = counters.from_peer;
  stats["within"] = counters.within;
  return stats;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("DEFAULT_LIMIT") = kDefaultLimit;
  module.def("device_count", &device_count);
  module.def("current_device", [] { return current_device; });
  module.def("set_device", [](int device) { hooks().setCurrentDevice(static_cast<DeviceIndex>(device)); });
  module.def("exchange_device",
             [](int device) { return static_cast<int>(hooks().exchangeDevice(static_cast<DeviceIndex>(device))); });
  module.def("restore_device", [](int device) { restore_device(device); });
  module.def("memory_info", [](int device) { return device_memory().getMemoryInfo(static_cast<DeviceIndex>(device)); });
  module.def("stats", [] {
    py::dict all;
    for (int device = 0; device < device_count(); ++device) {
      all[py::int_(device)] = stats_of(device);
    }
    return all;
  });
  module.def("log", [] { return Devices::instance().log(); });
  module.def("set_limit", [](int device, int64_t bytes) { Devices::instance().set_limit(device, bytes); });
  module.def("reset_peak", [](int device) { Devices::instance().reset_peak(device); });
  module.def("reset", [] {
    Devices::instance().reset();
    current_device = 0;
  });
}
