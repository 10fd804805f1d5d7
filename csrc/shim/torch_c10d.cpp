// torch_c10d.cpp - torch's process groups behind the plain-C interface of tensor.h; the only file that includes c10d.
//
// A process group moves bytes. Every call wraps its pointers as byte tensors and runs one collective; no dtype, no sum
// (we sum ourselves, in rank order, so that all transports are bit-identical).
//
// Nothing here needs the GIL. A Python process group takes it, so callers must not hold it.
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

extern "C" {
#include "shim/tensor.h"
}

struct zs_group {
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    std::chrono::milliseconds timeout;
    c10::Device device;
    std::shared_ptr<std::atomic<bool>> store_gone; // shared with threads that outlive the group
};

struct zs_work {
    const char *where;
    c10::intrusive_ptr<c10d::Work> work;
    std::vector<at::Tensor> tensors; // some process groups keep only references
    bool can_wait_a_while;           // wait(timeout) returns at the timeout, and the work continues
};

namespace {

at::Tensor bytes_at(const zs_group *group, const void *data, size_t bytes)
{
    const auto options = at::TensorOptions().dtype(at::kByte).device(group->device);
    const auto numel = static_cast<int64_t>(bytes);
    at::TensorMaker maker = at::for_blob(const_cast<void *>(data), numel);
    return maker.options(options).target_device(group->device).make_tensor();
}

// Process groups have no error codes: the message shows the kind of a failure (gloo's, MPI's, the store's).
zs_status kind_of(const std::string &text)
{
    for (const char *late : {"Timed out", "timed out", "timeout", "Timeout"})
        if (text.find(late) != std::string::npos) return ZS_ERR_TIMEOUT;
    for (const char *gone : {"closed by peer", "Connection reset", "Broken pipe", "Connection refused",
                             "Connection closed", "Socket closed"})
        if (text.find(gone) != std::string::npos) return ZS_ERR_PEER;
    return ZS_ERR_TORCH;
}

zs_status fail(const char *where, const std::string &text)
{
    return zs_fail(kind_of(text), "%s: %s", where, text.c_str());
}

// Runs `body`; no exception escapes. Disables the user's Python dispatch modes (a FLOP counter, a fake mode): these
// are our bytes, not the user's tensors.
template <typename Body> zs_status guarded(const char *where, Body body)
{
    try {
        c10::impl::ExcludeDispatchKeyGuard no_modes(
            c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
        body();
        return ZS_OK;
    } catch (const c10::Error &error) {
        return fail(where, error.what_without_backtrace());
    } catch (const std::exception &error) {
        return fail(where, error.what());
    } catch (...) {
        return fail(where, "unknown C++ exception");
    }
}

// torch 2.13 gave these two collectives new names and deprecated the old ones.
template <typename Group>
auto all_gather_bytes(Group &group, at::Tensor &out, at::Tensor &in, const c10d::AllgatherOptions &options)
{
    if constexpr (requires { group.all_gather_single(out, in, options); })
        return group.all_gather_single(out, in, options);
    else
        return group._allgather_base(out, in, options);
}

template <typename Group>
auto all_to_all_bytes(Group &group, at::Tensor &out, at::Tensor &in, const c10d::AllToAllOptions &options)
{
    std::vector<int64_t> equal; // no sizes: pieces of equal size
    if constexpr (requires { group.all_to_all_single(out, in, equal, equal, options); })
        return group.all_to_all_single(out, in, equal, equal, options);
    else
        return group.alltoall_base(out, in, equal, equal, options);
}

// Keeps the work that body(tensors) started, with the tensors.
template <typename Body>
zs_status start(const char *where, const zs_group *group, std::vector<at::Tensor> tensors, zs_work **work, Body body)
{
    return guarded(where, [&] {
        auto started = std::make_unique<zs_work>();
        started->where = where;
        started->tensors = std::move(tensors);
        started->can_wait_a_while = group->group->getBackendName() == "gloo";
        started->work = body(started->tensors);
        *work = started.release();
    });
}

// The same for a message of ours, hidden from torch's profiler: a message may be out for longer than a profiler
// records, and torch would write its end to memory that the profiler has freed.
template <typename Body>
zs_status start_message(const char *where, const zs_group *group, const void *data, size_t bytes, zs_work **work,
                        Body body)
{
    const at::DisableRecordFunctionGuard unrecorded;
    return start(where, group, {bytes_at(group, data, bytes)}, work, body);
}

// The store of a process group, if its class exposes it.
template <typename Group> c10::intrusive_ptr<c10d::Store> store_of(const Group &group)
{
    if constexpr (requires { group.getStore(); })
        return group.getStore();
    else
        return {};
}

// Requests that a store has not answered in time.
std::atomic<int> unanswered;

// The result of body(store); a default value if there is no store, or if it does not answer within `patience`. Runs
// on a separate thread: if the store's host cannot be reached, a TCPStore waits in recv for as long as TCP tries, a
// quarter of an hour, and also blocks its other callers. So nothing more is requested meanwhile. `body` must not
// refer to the caller's variables.
template <typename Answer, typename Body> Answer ask_store(const zs_group *group, Body body)
{
    constexpr std::chrono::seconds patience{5};
    struct question {
        std::promise<Answer> answer;
        std::atomic<int> ends{0}; // of two: the answer came, the caller left
    };
    auto store = store_of(*group->group);
    auto gone = group->store_gone;
    if (!store || unanswered > 0 || *gone) return {};
    try {
        auto asked = std::make_shared<question>();
        std::future<Answer> answer = asked->answer.get_future();
        std::thread([=] {
            try {
                asked->answer.set_value(body(*store));
            } catch (...) {   // the process with the store has exited, and
                *gone = true; // torch prints a stack trace for each further request
                asked->answer.set_value(Answer{});
            }
            if (asked->ends++ > 0) unanswered--;
        }).detach();
        if (answer.wait_for(patience) == std::future_status::ready) return answer.get();
        unanswered++;
        if (asked->ends++ > 0) unanswered--; // it has arrived since
    } catch (...) {                          // no thread is available
    }
    return {};
}

// The text under `key`; "" if there is none.
std::string read_text(const zs_group *group, const std::string &key)
{
    return ask_store<std::string>(
        group, [=](c10d::Store &store) { return store.check({key}) ? store.get_to_str(key) : std::string(); });
}

std::string page_key(int rank)
{
    return "zshard/page/" + std::to_string(rank);
}

std::string reason_key(int rank)
{
    return "zshard/last_words/" + std::to_string(rank);
}

} // namespace

extern "C" {

zs_status zs_group_new(const char *name, zs_group **out)
{
    return guarded("process group", [&] {
        *out = new zs_group{c10d::resolve_process_group(name), std::chrono::milliseconds(-1), at::kCPU,
                            std::make_shared<std::atomic<bool>>(false)};
    });
}

void zs_group_free(zs_group *group)
{
    delete group;
}

void zs_group_on(zs_group *group, zs_where where)
{
    if (where.type == ZS_ON_CUDA) group->device = {at::kCUDA, static_cast<c10::DeviceIndex>(where.index)};
}

void zs_group_set_timeout(zs_group *group, double seconds)
{
    // -1 is the process group's own timeout; longer than a month is equivalent
    group->timeout = std::chrono::milliseconds(seconds < 3e6 ? static_cast<int64_t>(seconds * 1e3) : -1);
}

zs_status zs_group_all_to_all(zs_group *group, const void *in, void *out, size_t piece_bytes, int world, zs_work **work)
{
    size_t bytes = piece_bytes * static_cast<size_t>(world);
    return start("all_to_all", group, {bytes_at(group, in, bytes), bytes_at(group, out, bytes)}, work,
                 [&](auto &tensors) {
                     c10d::AllToAllOptions options;
                     options.timeout = group->timeout;
                     return all_to_all_bytes(*group->group, tensors[1], tensors[0], options);
                 });
}

zs_status zs_group_all_gather(zs_group *group, const void *in, void *out, size_t bytes, int world, zs_work **work)
{
    at::Tensor target = bytes_at(group, out, bytes * static_cast<size_t>(world));
    return start("all_gather", group, {bytes_at(group, in, bytes), target}, work, [&](auto &tensors) {
        c10d::AllgatherOptions options;
        options.timeout = group->timeout;
        return all_gather_bytes(*group->group, tensors[1], tensors[0], options);
    });
}

zs_status zs_group_broadcast(zs_group *group, void *data, size_t bytes, int root, zs_work **work)
{
    return start("broadcast", group, {bytes_at(group, data, bytes)}, work, [&](auto &tensors) {
        c10d::BroadcastOptions options;
        options.rootRank = root;
        options.timeout = group->timeout;
        return group->group->broadcast(tensors, options);
    });
}

bool zs_group_has_messages(const zs_group *group)
{
    return group->group->getBackendName() == "gloo";
}

zs_status zs_group_send(zs_group *group, const void *data, size_t bytes, int to, zs_work **work)
{
    return start_message("send", group, data, bytes, work,
                         [&](auto &tensors) { return group->group->send(tensors, to, 0); });
}

zs_status zs_group_receive(zs_group *group, void *data, size_t bytes, int from, zs_work **work)
{
    return start_message("receive", group, data, bytes, work,
                         [&](auto &tensors) { return group->group->recv(tensors, from, 0); });
}

bool zs_work_await(zs_work *work)
{
    constexpr std::chrono::hours a_year{24 * 365}; // gloo closes the group's connections at a timeout
    bool came = false;
    const zs_status status = guarded(work->where, [&] { came = work->work->wait(a_year); });
    return status == ZS_OK && came;
}

void zs_work_abort(zs_work *work)
{
    try {
        work->work->abort();
    } catch (...) {
    }
}

void zs_work_hang_up(zs_work *work)
{
    try {
        work->work->wait(std::chrono::milliseconds(1)); // too late: gloo closes the group's connections
    } catch (...) {
    }
}

bool zs_work_done(const zs_work *work)
{
    try {
        return work->work->isCompleted();
    } catch (...) {
        return true; // the wait reports the error
    }
}

zs_status zs_work_wait(zs_work *work, double seconds, bool *done)
{
    *done = true;
    return guarded(work->where, [&] {
        if (!work->can_wait_a_while) {
            work->work->wait();
            return;
        }
        try {
            work->work->wait(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3)));
        } catch (...) { // too late, or the collective's own failure; it may also have ended since
            *done = work->work->isCompleted();
            if (*done) work->work->wait();
        }
    });
}

void zs_work_free(zs_work *work)
{
    delete work;
}

// --- reasons -------------------------------------------------------------------------------------------------------

void zs_group_publish_text(zs_group *group, int rank, const char *reason)
{
    const std::string key = reason_key(rank), text = reason;
    // Neither sets nor clears a record: the caller reports.
    (void)ask_store<bool>(group, [=](c10d::Store &store) {
        store.set(key, text);
        return true;
    });
}

uint64_t zs_group_ask_positions(zs_group *group)
{
    return ask_store<uint64_t>(group,
                               [](c10d::Store &store) { return static_cast<uint64_t>(store.add("zshard/asked", 1)); });
}

void zs_group_read_answer(zs_group *group, uint64_t number, int rank, char *text, size_t size)
{
    const std::string answer = read_text(group, "zshard/at/" + std::to_string(number) + "/" + std::to_string(rank));
    if (!answer.empty()) snprintf(text, size, "%s", answer.c_str());
}

bool zs_group_leave_page(zs_group *group, int rank, int world, void *pages, size_t bytes)
{
    char *all = static_cast<char *>(pages), *mine = all + static_cast<size_t>(rank) * bytes;
    const std::vector<uint8_t> own(mine, mine + bytes);
    using Pages = std::vector<std::vector<uint8_t>>;
    const Pages found = ask_store<Pages>(group, [=](c10d::Store &store) {
        Pages read;
        store.set(page_key(rank), own);
        if (store.add("zshard/pages", 1) != world) return read;
        for (int r = 0; r < world; r++)
            read.push_back(store.get(page_key(r)));
        return read;
    });
    for (const std::vector<uint8_t> &page : found)
        if (page.size() != bytes) return false;
    for (size_t r = 0; r < found.size(); r++)
        memcpy(all + r * bytes, found[r].data(), bytes);
    return !found.empty();
}

void zs_group_read_text(zs_group *group, int rank, char *reason, size_t size)
{
    snprintf(reason, size, "%s", read_text(group, reason_key(rank)).c_str());
}

} // extern "C"
