// What a peer may send without a grant.
#pragma once

#include <cstdint>

namespace syncline {

// The receiver's account of what one peer may send without asking. A message costs its bytes and a header, so that
// empty messages have a bound too; what was consumed is given back in batches of a quarter, so that credit costs few
// frames.
class EagerCredit {
   public:
    explicit EagerCredit(int64_t credit_bytes) : credit_bytes(credit_bytes) {}

    int64_t credit_bytes;
    int64_t used_bytes() const { return used_bytes_; }

    bool take(int64_t cost_bytes) {
        used_bytes_ += cost_bytes;
        return used_bytes_ <= credit_bytes;
    }
    int64_t consume(int64_t cost_bytes) {
        owed_bytes_ += cost_bytes;
        if (owed_bytes_ * 4 < credit_bytes) return 0;
        const int64_t returned = owed_bytes_;
        owed_bytes_ = 0;
        used_bytes_ -= returned;
        return returned;
    }

   private:
    int64_t used_bytes_ = 0, owed_bytes_ = 0;
};

}  // namespace syncline
