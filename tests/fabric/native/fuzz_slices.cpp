// Calls of two to four ranks in one process, cut into slices; this file is the network between them, and moves what
// each rank sends in parts of any size and any order. Some read messages out of the memory of others. Whatever order
// that is, and in every third run connections break and bytes are changed on the way,
//
// - every call ends on every rank, and all hold the same bits: contributions added in the order of the ranks;
// - a call that is stopped touches its buffer no more, and in the end nobody holds any of its memory;
// - the order of slices never has more under way than it may, and forgets nothing that can begin.
#include <unistd.h>

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fuzzing.hpp"
#include "slice_executor.hpp"

namespace {

using namespace syncline;
using fuzzing::Random;
using fuzzing::require;

constexpr int64_t CREDIT_BYTES = 20'000;

// An all-reduce of one atom for each rank: everybody sends each atom to its owner, who adds them up and sends the sum.
std::shared_ptr<Dataflow> all_reduce(int rank, int num_ranks) {
    auto made = std::make_shared<Dataflow>();
    auto& operations = made->operations;
    const auto add = [&](Kind kind, int atom, int peer, int phase, int from, int to, uint32_t num_waits) {
        const auto first = static_cast<size_t>(atom);
        const int index = (phase * num_ranks + from) * num_ranks + to;
        operations.push_back({kind, first, first + 1, peer, peer, static_cast<uint64_t>(index), {}, {}, {}, {}, false});
        made->num_waits.push_back(num_waits);
        return static_cast<uint32_t>(operations.size() - 1);
    };
    const uint32_t sum = add(Kind::APPLY, rank, -1, 0, 0, 0, 0);
    made->first.push_back(sum);
    for (int peer = 0; peer < num_ranks; ++peer) {
        if (peer == rank) continue;
        const uint32_t landing = add(Kind::LAND, rank, peer, 0, peer, rank, 0);
        operations[landing].applies = {sum};
        (peer < rank ? operations[sum].before : operations[sum].after).push_back(landing);
        const uint32_t contribution = add(Kind::SEND, peer, peer, 0, rank, peer, 0);
        operations[contribution].then = {add(Kind::COPY, peer, peer, 1, peer, rank, 1)};
        const uint32_t result = add(Kind::SEND, rank, peer, 1, rank, peer, 1);
        operations[sum].then.push_back(result);
        made->first.push_back(landing);
        made->first.push_back(contribution);
    }
    return made;
}

struct Rank {
    std::shared_ptr<NativeTransport> transport;
    std::shared_ptr<SliceExecutor> executor;
    int num_done = 0;
};

// What one rank sent to another on one connection, and that one has not yet read.
using Wire = std::deque<uint8_t>;

struct Call {
    std::vector<std::vector<float>> contributions;
    std::vector<std::shared_ptr<std::vector<float>>> buffers;
    std::vector<std::shared_ptr<CallRun>> runs;
    bool is_stopped = false;
};

class Run {
   public:
    explicit Run(uint64_t seed)
        : random_(seed),
          num_ranks_(2 + random_.below(3)),
          breaks_(~seed),
          break_rate_(seed % 3 ? 0.0 : 0.02),
          has_keys_(seed % 2) {
        const int64_t window_bytes = 500 + random_.below(20'000);
        for (int rank = 0; rank < num_ranks_; ++rank) add_rank(rank, window_bytes);
        for (int from = 0; from < num_ranks_; ++from)
            for (int to = 0; to < num_ranks_; ++to)
                if (from != to) connect(from, to);
    }

    void run() {
        const int num_calls = 1 + random_.below(3);
        for (int number = 0; number < num_calls; ++number) open_call(number);
        for (int number = 0; number < num_calls; ++number)
            for (int rank = 0; rank < num_ranks_; ++rank) {
                calls_[static_cast<size_t>(number)].runs[static_cast<size_t>(rank)]->start();
                for (int move = random_.below(4); move; --move) move_something();
            }
        if (random_.chance(0.2)) stop(random_.of(std::vector<size_t>{0, calls_.size() - 1}));
        while (move_something()) {
        }
        for (Call& call : calls_) check(call);
    }

    std::string close() {
        bool is_stopped = false;
        for (Call& call : calls_) is_stopped |= call.is_stopped;
        for (Call& call : calls_) call.runs.clear();
        for (Rank& rank : ranks_) rank.transport->close();
        for (const Call& call : calls_)
            for (const auto& buffer : call.buffers) require(buffer.use_count() == 1, "nobody holds a buffer");
        return is_stopped ? "stopped" : "whole";
    }

   private:
    using Route = std::pair<std::pair<int, int>, int>;
    Random random_;
    int num_ranks_;
    std::vector<Rank> ranks_;
    Random breaks_;  // a generator of its own, so that seeds without breaks replay what they did before there were any
    double break_rate_;  // of connections, and of bytes that are changed on the way
    const bool has_keys_;
    std::map<Route, Wire> wires_;
    std::vector<Call> calls_;

    void add_rank(int rank, int64_t window_bytes) {
        const auto scheduler = std::make_shared<GrantScheduler>(
            GrantWindow(window_bytes, window_bytes, 1e9), 1 + random_.below(8000), std::unordered_map<int, int64_t>{},
            std::unordered_map<int, GrantScheduler::Shares>{});
        Rank added;
        added.transport = std::make_shared<NativeTransport>(scheduler);
        added.executor = std::make_shared<SliceExecutor>(added.transport, std::make_shared<TemporaryPool>(1 << 20),
                                                         1 + random_.below(5000));
        for (int peer = 0; peer < num_ranks_; ++peer)
            if (peer != rank) added.transport->add_peer(peer, random_.below(1000), CREDIT_BYTES);
        ranks_.push_back(std::move(added));
    }

    PeerTransport& peer(int rank, int other) { return ranks_[static_cast<size_t>(rank)].transport->peer(other); }

    static Aes::Block key(int from, int to, int connection_class) {
        return {static_cast<uint8_t>(from), static_cast<uint8_t>(to), static_cast<uint8_t>(2 + connection_class)};
    }

    // No descriptors: each connection waits for the kernel to take more, and is asked here for what it would send.
    void connect(int from, int to) {
        PeerTransport& connected = peer(from, to);
        connected.connections.control.attach(0);
        const int num_classes = 2;
        for (int number = 0; number < num_classes; ++number) connected.attach_data(0, 100 + random_.below(5000));
        connected.connections.each([](Connection& connection) { connection.is_watching_writer = true; });
        if (has_keys_) {
            connected.connections.each([from, to](Connection& connection) {
                connection.sending.use_key(key(from, to, connection.connection_class));
                connection.receiving.use_key(key(to, from, connection.connection_class));
            });
        }
        connected.send_frame(CREDIT, 0, CREDIT_BYTES, "");
        if (random_.chance(0.5)) return;
        connected.sender.reads_us = true;
        peer(to, from).receiver.pid = ::getpid();
    }

    void open_call(int number) {
        const size_t num_slices = 1 + random_.below(size_t{3});
        const auto num_atoms = static_cast<size_t>(num_ranks_);
        std::vector<std::vector<size_t>> offsets(num_slices);
        size_t end = 0;
        for (auto& slice : offsets) {
            slice.push_back(end);
            for (size_t atom = 0; atom < num_atoms; ++atom)
                slice.push_back(end += sizeof(float) * (random_.chance(0.1) ? 0 : random_.below(size_t{600})));
        }
        Call call;
        for (int rank = 0; rank < num_ranks_; ++rank) {
            std::vector<float> values(end / sizeof(float));
            for (float& value : values) value = static_cast<float>(random_.below(1'000'000)) / 7.0F;
            call.contributions.push_back(values);
            call.buffers.push_back(std::make_shared<std::vector<float>>(std::move(values)));
            const auto layout = std::make_shared<Layout>();
            const auto dataflow = all_reduce(rank, num_ranks_);
            for (const auto& slice : offsets)
                layout->slices.push_back({dataflow, slice, addition_of("float32", "sum")});
            const auto& buffer = call.buffers.back();
            const Memory memory{reinterpret_cast<uint8_t*>(buffer->data()), static_cast<int64_t>(end), buffer};
            const MessageSettings settings{static_cast<uint64_t>(number) << 20, 7, number % 2, random_.below(2)};
            call.runs.push_back(std::make_shared<CallRun>(ranks_[static_cast<size_t>(rank)].executor, layout, memory,
                                                          settings, 1 << 10, number, PythonReference()));
        }
        calls_.push_back(std::move(call));
    }

    // After this the buffers may go, except for messages that are leaving.
    void stop(size_t number) {
        Call& call = calls_[number];
        call.is_stopped = true;
        for (const auto& run : call.runs) run->stop();
        for (size_t rank = 0; rank < call.buffers.size(); ++rank) call.contributions[rank] = *call.buffers[rank];
    }

    // Let one rank send something, or one read something; false if nothing is on its way.
    bool move_something() {
        for (int from = 0; from < num_ranks_; ++from) {
            if (random_.chance(0.5)) fetch(from);
            ranks_[static_cast<size_t>(from)].transport->finish();
            take_events(ranks_[static_cast<size_t>(from)]);
            for (int to = 0; to < num_ranks_; ++to)
                if (from != to && random_.chance(0.7)) collect(from, to);
        }
        std::vector<Route> routes = open_routes();
        if (routes.empty()) {
            for (int rank = 0; rank < num_ranks_; ++rank)
                while (fetch(rank)) ranks_[static_cast<size_t>(rank)].transport->finish();
            for (int from = 0; from < num_ranks_; ++from)
                for (int to = 0; to < num_ranks_; ++to)
                    if (from != to) collect(from, to);
            routes = open_routes();
        }
        if (routes.empty()) return false;
        const Route route = random_.of(routes);
        PeerTransport& reader = peer(route.first.second, route.first.first);
        Wire& wire = wires_[route];
        if (break_rate_ > 0) {
            if (breaks_.chance(0.05)) reader.send_frame(HEARTBEAT, 0, 0, "");  // which acknowledges what has arrived
            if (breaks_.chance(break_rate_)) {
                break_connection(route);
                return true;
            }
            if (breaks_.chance(break_rate_))
                wire[breaks_.below(wire.size())] ^= static_cast<uint8_t>(1 << breaks_.below(8));
        }
        try {
            feed(reader, route.second, wire);
        } catch (const FrameError& error) {
            require(error.is_damage && break_rate_ > 0, "a good peer breaks no rule");
            break_connection(route);
        }
        return true;
    }

    // All that is on its way is lost, in both directions; each end sends again what the other has not got.
    void break_connection(const Route& route) {
        const auto [ranks, connection_class] = route;
        wires_[route].clear();
        wires_[{{ranks.second, ranks.first}, connection_class}].clear();
        Connection& one = peer(ranks.first, ranks.second).connections.of_class(connection_class);
        Connection& other = peer(ranks.second, ranks.first).connections.of_class(connection_class);
        one.interrupt();
        other.interrupt();
        require(one.stream.rewind(other.received_bytes_of_stream), "what did not arrive is still here");
        require(other.stream.rewind(one.received_bytes_of_stream), "what did not arrive is still here");
    }

    // Let one rank copy some of a message out of another's memory; false if none lies there.
    bool fetch(int rank) {
        NativeTransport& transport = *ranks_[static_cast<size_t>(rank)].transport;
        if (!transport.has_fetches()) return false;
        const Fetch next = transport.state().fetches.take();
        transport.peer(next.peer).fetch(next, 1 + random_.below(int64_t{2000}));
        return true;
    }

    std::vector<Route> open_routes() const {
        std::vector<Route> routes;
        for (const auto& [route, wire] : wires_)
            if (!wire.empty()) routes.push_back(route);
        return routes;
    }

    static void take_events(Rank& rank) {
        while (rank.transport->has_events()) {
            const Event event = rank.transport->next_event();
            require(event.kind == DONE, "a good peer causes no other event than the end of a call");
            ++rank.num_done;
        }
    }

    void collect(int from, int to) {
        Connections& connections = peer(from, to).connections;
        ControlConnection& control = connections.control;
        Wire& wire = wires_[{{from, to}, CONTROL_CLASS}];
        while (control.has_unsent()) {
            const SendStream::Gathered gathered = control.gather();
            for (size_t part = 0; part < gathered.num_parts; ++part) {
                const auto* data = static_cast<const uint8_t*>(gathered.parts.at(part).iov_base);
                wire.insert(wire.end(), data, data + gathered.parts.at(part).iov_len);
            }
            control.sent(gathered.num_bytes);
        }
        for (auto& connection : connections.data) {
            const SendStream::Gathered gathered = connection->gather();
            if (!gathered.num_parts) continue;
            const size_t most = 1 + random_.below(gathered.num_bytes);
            size_t taken = 0;
            for (size_t part = 0; part < gathered.num_parts && taken < most; ++part) {
                const auto* data = static_cast<const uint8_t*>(gathered.parts[part].iov_base);
                const size_t num_bytes = std::min(gathered.parts[part].iov_len, most - taken);
                auto& into = wires_[{{from, to}, connection->connection_class}];
                into.insert(into.end(), data, data + num_bytes);
                taken += num_bytes;
            }
            connection->sent(taken);
        }
    }

    void feed(PeerTransport& reader, int connection_class, Wire& wire) {
        const auto take = [&wire](void* into, size_t num_bytes) {
            std::copy_n(wire.begin(), num_bytes, static_cast<uint8_t*>(into));
            wire.erase(wire.begin(), wire.begin() + static_cast<std::ptrdiff_t>(num_bytes));
        };
        if (connection_class == CONTROL_CLASS) {
            ControlConnection& control = reader.connections.control;
            const size_t num_bytes = 1 + random_.below(std::min(wire.size(), control.room_bytes()));
            take(control.room(), num_bytes);
            control.arrived(num_bytes);
            return;
        }
        DataConnection& data = *reader.connections.data[static_cast<size_t>(connection_class)];
        const DataConnection::Room room = data.room();
        const size_t num_bytes = 1 + random_.below(std::min(wire.size(), room.num_bytes));
        const size_t num_first = std::min(num_bytes, room.parts[0].iov_len);
        take(room.parts[0].iov_base, num_first);
        if (num_bytes > num_first) take(room.parts[1].iov_base, num_bytes - num_first);
        data.arrived(num_bytes);
    }

    void check(const Call& call) {
        if (call.is_stopped) {
            for (size_t rank = 0; rank < call.buffers.size(); ++rank)
                require(same_bits(*call.buffers[rank], call.contributions[rank]), "a stopped call writes no more");
            return;
        }
        std::vector<float> sums = call.contributions[0];
        for (size_t rank = 1; rank < call.contributions.size(); ++rank)
            for (size_t place = 0; place < sums.size(); ++place) sums[place] += call.contributions[rank][place];
        for (const auto& buffer : call.buffers) require(same_bits(*buffer, sums), "every rank has the sum to the bit");
    }

    static bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
        return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(float)));
    }
};

}  // namespace

void fuzzing::run_slices(uint64_t seed, Outcomes& outcomes) {
    Run run(seed);
    run.run();
    ++outcomes[run.close()];
}
