// A hostile peer, fed straight to the parsers of its connections: frames that a good peer might send, of which a few
// are changed, doubled, damaged or put on another connection, in parts of any size. Whatever comes,
//
// - the peer is refused with a FrameError, or all goes on;
// - a destination is written only while its receive is posted, and is told to be whole only when each byte came;
// - what came before its receive is never more than the credit, and in the end nobody holds any memory;
// - what this rank sends stays within what was granted, in order and with the right checksums.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fuzzing.hpp"
#include "transport.hpp"

namespace {

using namespace syncline;
using fuzzing::Random;
using fuzzing::require;

constexpr int64_t CREDIT_BYTES = 150'000;
constexpr uint32_t SIGNATURE = 7;
constexpr uint8_t UNTOUCHED = 0xEE;  // what destinations hold at first; payloads have no such byte
constexpr int PEER = 1;
constexpr int NUM_CLASSES = 2;
constexpr std::array<uint32_t, 8> SIZES = {0, 1, 47, 300, 4096, 5000, 20'000, 60'000};

using Bytes = std::vector<uint8_t>;

Bytes payload_of(size_t start, size_t stop) {
    Bytes payload(stop - start);
    for (size_t place = start; place < stop; ++place) payload[place - start] = static_cast<uint8_t>(place % 200);
    return payload;
}

Memory memory_in(const std::shared_ptr<Bytes>& bytes) {
    return {bytes->data(), static_cast<int64_t>(bytes->size()), bytes};
}

// A message of the rank under attack, which hears of its end.
struct Message : Listener {
    explicit Message(size_t num_bytes) : bytes(std::make_shared<Bytes>(num_bytes, UNTOUCHED)) {}
    void ended(uint32_t) override {
        require(!is_over && !is_cancelled, "a message is told of once, and not after it was cancelled");
        is_over = true;
    }
    std::shared_ptr<Bytes> bytes;
    bool is_over = false, is_cancelled = false;
};

// In place of the peer's memory.
int read_ones(int, uint64_t, uint8_t* into, int64_t num_bytes) {
    std::memset(into, 1, static_cast<size_t>(num_bytes));
    return 0;
}

struct Frame {
    Header header;
    Bytes payload;
    int connection;
};

class Run {
   public:
    explicit Run(uint64_t seed)
        : random_(seed),
          rate_(random_.of(std::vector<double>{0.0, 0.01, 0.05, 0.2})),
          transport_(std::make_shared<GrantScheduler>(GrantWindow(100 + random_.below(100'000), 100, 1e6),
                                                      1 + random_.below(9000), std::unordered_map<int, int64_t>{},
                                                      std::unordered_map<int, GrantScheduler::Shares>{})) {
        transport_.add_peer(PEER, 4096, CREDIT_BYTES);
        // No descriptors: each connection waits for the kernel to take more, and is asked here for what it would send.
        peer().connections.control.attach(0);
        for (int number = 0; number < NUM_CLASSES; ++number) peer().attach_data(0, 4096);
        if (seed % 3 == 0) use_keys();
        peer().connections.each([](Connection& connection) { connection.is_watching_writer = true; });
        transport_.state().read_memory = &read_ones;
        peer().receiver.pid = random_.chance(0.4) ? 1 : 0;
        peer().sender.reads_us = random_.chance(0.3);
    }

    std::string run() {
        try {
            for (int action = 4 + random_.below(24); action; --action) {
                act();
                transport_.finish();
                read_control();
                read_data();
                fetch();
                take_events();
                attack();
                require(peer().receiver.unexpected_bytes <= CREDIT_BYTES, "no more waits than the credit allows");
            }
        } catch (const FrameError& error) {
            return error.is_damage ? "damaged" : "refused";
        }
        return "over";
    }

    void close() {
        peer().close();
        transport_.close();
        for (const auto* messages : {&receives_, &sends_})
            for (const auto& message : *messages)
                require(message->bytes.use_count() == 1, "nobody holds memory after the end");
        for (const auto& receive : receives_) {
            const bool is_partly_untouched =
                std::find(receive->bytes->begin(), receive->bytes->end(), UNTOUCHED) != receive->bytes->end();
            require(!receive->is_over || !is_partly_untouched, "a message that is whole has each of its bytes");
        }
        require(peer().sender.num_unsent == 0, "nothing is left to send");
    }

   private:
    Random random_;
    double rate_;  // of frames that are not a good peer's
    NativeTransport transport_;
    std::vector<std::shared_ptr<Message>> receives_, sends_;
    std::map<uint64_t, uint64_t> granted_, sent_, sizes_;  // by tag: of what the peer sends
    std::map<uint64_t, Header> asked_;                     // by tag: requests of the rank under attack
    std::map<uint64_t, uint64_t> allowed_, arrived_;       // by tag: what the rank may send, and has sent
    std::map<int, FrameChecks> made_, read_;               // by connection: of what it sends, and of what it is sent
    std::map<int, Bytes> begun_;                           // by connection: what is not fed yet
    std::array<Bytes, NUM_CLASSES> inboxes_;
    uint64_t num_tags_ = 0;

    PeerTransport& peer() { return transport_.peer(PEER); }

    // --- what the rank under attack does ---

    void act() {
        const int choice = random_.below(10);
        if (choice < 5) {
            const auto tag = static_cast<uint64_t>(receives_.size());
            receives_.push_back(std::make_shared<Message>(SIZES[random_.chance(0.9) ? tag % SIZES.size() : 5]));
            peer().receiver.receive({tag, SIGNATURE, random_.below(3), 0}, memory_in(receives_.back()->bytes),
                                    {{}, receives_.back(), 0});
        } else if (choice < 8) {
            const auto tag = static_cast<uint64_t>(sends_.size());
            sends_.push_back(std::make_shared<Message>(0));
            *sends_.back()->bytes = payload_of(0, random_.of(SIZES));
            peer().sender.send({tag, SIGNATURE, 0, random_.below(NUM_CLASSES)}, memory_in(sends_.back()->bytes),
                               {{}, sends_.back(), 0});
        } else if (!receives_.empty()) {
            const uint64_t tag = random_.below(receives_.size());
            Message& message = *receives_[tag];
            if (message.is_over || message.is_cancelled) return;
            peer().receiver.cancel(tag);
            message.is_cancelled = true;
            require(message.bytes.use_count() == 1, "a receive that was cancelled holds no memory");
            *message.bytes = Bytes();  // whoever still writes there is caught
        }
    }

    void take_events() {
        while (transport_.has_events()) {
            const Event event = transport_.next_event();
            require(event.kind != FAULT, "nothing fails by itself");
        }
    }

    // Copy messages as from the peer's memory, in parts.
    void fetch() {
        while (transport_.has_fetches() && random_.chance(0.8)) {
            const Fetch next = transport_.state().fetches.take();
            peer().fetch(next, 1 + random_.below(int64_t{30'000}));
        }
    }

    // Each connection and direction has a key of its own.
    void use_keys() {
        peer().connections.each([this](Connection& connection) {
            Aes::Block key{};
            key[0] = static_cast<uint8_t>(2 + connection.connection_class);
            connection.sending.use_key(key);
            read_[connection.connection_class].use_key(key);
            key[1] = 1;
            connection.receiving.use_key(key);
            made_[connection.connection_class].use_key(key);
        });
    }

    // --- what it sends ---

    void read_control() {
        ControlConnection& control = peer().connections.control;
        FrameChecks& checks = read_[CONTROL_CLASS];
        while (control.has_unsent()) {
            const SendStream::Gathered gathered = control.gather();
            for (size_t part = 0; part < gathered.num_parts; ++part)
                for (size_t place = 0; place < gathered.parts.at(part).iov_len;) {
                    const Header frame =
                        decode_header(static_cast<const uint8_t*>(gathered.parts.at(part).iov_base) + place, checks);
                    checks.add(static_cast<const uint8_t*>(gathered.parts.at(part).iov_base) + place + HEADER_BYTES,
                               frame.chunk_bytes);
                    check_payload(frame, checks);
                    place += HEADER_BYTES + frame.chunk_bytes;
                    if (frame.type == GRANT) granted_[frame.tag] = frame.message_bytes;
                    if (frame.type == REQUEST) asked_[frame.tag] = frame;
                }
            control.sent(gathered.num_bytes);
        }
    }

    void read_data() {
        for (auto& connection : peer().connections.data) {
            const SendStream::Gathered gathered = connection->gather();
            if (!gathered.num_parts) continue;
            size_t rest = 1 + random_.below(gathered.num_bytes);
            const size_t num_taken = rest;
            Bytes& inbox = inboxes_.at(static_cast<size_t>(connection->connection_class));
            for (size_t part = 0; rest; ++part) {
                const auto* data = static_cast<const uint8_t*>(gathered.parts.at(part).iov_base);
                const size_t num_bytes = std::min(gathered.parts.at(part).iov_len, rest);
                inbox.insert(inbox.end(), data, data + num_bytes);
                rest -= num_bytes;
            }
            connection->sent(num_taken);
            while (take_chunk(inbox, read_[connection->connection_class])) {
            }
        }
    }

    bool take_chunk(Bytes& inbox, FrameChecks& checks) {
        if (inbox.size() < HEADER_BYTES) return false;
        const Header frame = decode_header(inbox.data(), checks);
        const size_t end = HEADER_BYTES + frame.chunk_bytes;
        if (inbox.size() < end) return false;
        const Bytes payload(inbox.begin() + HEADER_BYTES, inbox.begin() + static_cast<std::ptrdiff_t>(end));
        checks.add(payload.data(), payload.size());
        check_payload(frame, checks);
        require(payload == payload_of(frame.offset, frame.offset + frame.chunk_bytes), "what is sent is the message");
        if (frame.type == DATA) {
            require(frame.offset == arrived_[frame.tag], "a message is sent in order");
            arrived_[frame.tag] += frame.chunk_bytes;
            require(arrived_[frame.tag] <= allowed_[frame.tag], "nothing is sent that was not granted");
        }
        inbox.erase(inbox.begin(), inbox.begin() + static_cast<std::ptrdiff_t>(end));
        return true;
    }

    // --- the peer ---

    void attack() {
        Frame frame = good_frame();
        if (random_.chance(rate_)) mutate(frame);
        put(frame);
        if (random_.chance(rate_)) {
            frame.connection = random_.below(NUM_CLASSES + 1) - 1;
            put(frame);
        }
        for (auto& [connection, bytes] : begun_)
            while (!bytes.empty() && random_.chance(0.9)) feed(connection, bytes);
    }

    void put(const Frame& frame) {
        Header header = frame.header;
        if (frame.connection != CONTROL_CLASS && header.connection_class == CONTROL_CLASS)
            header.connection_class = static_cast<int16_t>(frame.connection);
        const EncodedHeader encoded =
            seal(header, frame.payload.data(), static_cast<uint32_t>(frame.payload.size()), made_[frame.connection]);
        if (header.type == GRANT) allowed_[header.tag] = std::max(allowed_[header.tag], header.message_bytes);
        Bytes bytes(encoded.begin(), encoded.end());
        bytes.insert(bytes.end(), frame.payload.begin(), frame.payload.end());
        if (random_.chance(rate_ / 10))
            bytes[random_.below(bytes.size())] ^= static_cast<uint8_t>(1 + random_.below(255));
        Bytes& begun = begun_[frame.connection];
        begun.insert(begun.end(), bytes.begin(), bytes.end());
    }

    void feed(int connection_class, Bytes& bytes) {
        Connections& connections = peer().connections;
        if (connection_class == CONTROL_CLASS) {
            const size_t num_bytes = 1 + random_.below(std::min(bytes.size(), connections.control.room_bytes()));
            std::memcpy(connections.control.room(), bytes.data(), num_bytes);
            bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(num_bytes));
            connections.control.arrived(num_bytes);
            return;
        }
        DataConnection& data = *connections.data[static_cast<size_t>(connection_class)];
        const DataConnection::Room room = data.room();
        const size_t num_bytes = 1 + random_.below(std::min(bytes.size(), room.num_bytes));
        const size_t num_first = std::min(num_bytes, room.parts[0].iov_len);
        if (num_first) std::memcpy(room.parts[0].iov_base, bytes.data(), num_first);
        if (num_bytes > num_first) std::memcpy(room.parts[1].iov_base, bytes.data() + num_first, num_bytes - num_first);
        bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(num_bytes));
        data.arrived(num_bytes);
    }

    Frame good_frame() {
        std::vector<uint64_t> open;
        for (const auto& [tag, limit] : granted_)
            if (sent_[tag] < limit) open.push_back(tag);
        const int choice = random_.below(10);
        if (!open.empty() && choice < 5) return chunk(random_.of(open));
        if (choice < 7) return announcement();
        if (choice < 8) return small_message();
        return answer();
    }

    static Frame frame_of(FrameType type, uint64_t tag, uint64_t message_bytes) {
        Frame frame{{}, {}, CONTROL_CLASS};
        frame.header.type = type;
        frame.header.tag = tag;
        frame.header.message_bytes = message_bytes;
        frame.header.signature = type <= REQUEST ? SIGNATURE : 0;
        return frame;
    }

    Frame chunk(uint64_t tag) {
        const uint64_t start = sent_[tag];
        const uint64_t stop = std::min(granted_[tag], start + random_.of(std::vector<uint64_t>{1, 500, 4096, 70'000}));
        sent_[tag] = stop;
        Frame frame = frame_of(DATA, tag, sizes_.count(tag) ? sizes_[tag] : stop);
        frame.header.offset = start;
        frame.payload = payload_of(start, stop);
        frame.connection = static_cast<int>(tag % NUM_CLASSES);
        return frame;
    }

    // The next tag, and most often the size that its receive has or will have.
    std::pair<uint64_t, uint32_t> next_message() {
        const uint64_t tag = num_tags_ && random_.chance(rate_ / 5) ? random_.below(num_tags_) : num_tags_++;
        return {tag, random_.chance(rate_ / 5) ? random_.of(SIZES) : SIZES[tag % SIZES.size()]};
    }

    Frame announcement() {
        const auto [tag, num_bytes] = next_message();
        sizes_[tag] = num_bytes;
        Frame frame = frame_of(REQUEST, tag, num_bytes);
        if (peer().receiver.pid && num_bytes && random_.chance(0.5)) frame.header.offset = 4096;
        return frame;
    }

    Frame small_message() {
        const auto [tag, num_bytes] = next_message();
        Frame frame = frame_of(EAGER, tag, num_bytes);
        frame.payload = payload_of(0, num_bytes);
        frame.connection = random_.below(NUM_CLASSES);
        return frame;
    }

    Frame answer() {
        if (!asked_.empty() && random_.chance(0.8)) {
            const Header request = asked_.begin()->second;
            const uint64_t before = std::min(allowed_[request.tag], request.message_bytes);
            const uint64_t limit = before + random_.below(request.message_bytes - before + 1);
            if (limit == before || limit == request.message_bytes) asked_.erase(request.tag);
            if (request.offset && !before) {
                asked_.erase(request.tag);
                return frame_of(FETCHED, request.tag, 0);
            }
            return limit == before ? frame_of(DISCARD, request.tag, 0) : frame_of(GRANT, request.tag, limit);
        }
        if (random_.chance(0.02)) {
            Frame end = frame_of(END, 0, 0);
            end.connection = random_.below(NUM_CLASSES + 1) - 1;
            return end;
        }
        return frame_of(random_.of(std::vector<FrameType>{CREDIT, HEARTBEAT, CONTROL}), 0, 100);
    }

    // Change one thing; the checksums will be right.
    void mutate(Frame& frame) {
        Header& header = frame.header;
        const auto number = [this](uint64_t before) {
            const std::vector<uint64_t> others = {before - 1, before + 1, before + 4096, 0,     uint64_t{1} << 31,
                                                  1ULL << 32, 1ULL << 62, 1ULL << 63,    ~0ULL, random_.next()};
            return random_.of(others);
        };
        switch (random_.below(8)) {
            case 0:
                header.type = static_cast<uint8_t>(random_.below(20));
                break;
            case 1:
                header.connection_class = static_cast<int16_t>(random_.below(6) - 3);
                break;
            case 2:
                header.tag = number(header.tag);
                break;
            case 3:
                header.signature = random_.of(std::vector<uint32_t>{0, 8, 0xFFFFFFFFU});
                break;
            case 4:
                header.message_bytes = number(header.message_bytes);
                break;
            case 5:
                header.offset = number(header.offset);
                break;
            case 6:
                frame.connection = random_.below(NUM_CLASSES + 1) - 1;
                break;
            default:
                frame.payload.resize(random_.of(std::vector<size_t>{0, frame.payload.size() / 2, 48, 5000}), 1);
        }
    }
};

}  // namespace

void fuzzing::run_frames(uint64_t seed, Outcomes& outcomes) {
    Run run(seed);
    const std::string outcome = run.run();
    run.close();
    ++outcomes[outcome];
}
