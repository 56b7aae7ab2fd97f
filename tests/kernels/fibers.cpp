// All operations as a GPU runs them, each thread a fiber (fibers.h), and kernels that only tests run.
#include "../../kernels/cpu/variant.cpp"

// The conversions that stand for the GPU's, one at a time.
extern "C" MT_EXPORT float decode_e4m3(uint8_t code) { return conversions::decode<3>(code); }
extern "C" MT_EXPORT float decode_e5m2(uint8_t code) { return conversions::decode<2>(code); }
extern "C" MT_EXPORT uint8_t encode_e4m3(float value) { return conversions::encode<3>(value); }
extern "C" MT_EXPORT uint8_t encode_e5m2(float value) { return conversions::encode<2>(value); }

// Kernels that are right, or wrong in a way that the fibers must find.
enum Kind : uint32_t {
    kTogether,
    kLaneLeaves,
    kTwoLines,
    kTwoCopies,
    kBarrierSkipped,
    kBarrierAndTeam,
    kTwoBarriers,
};

struct Diverging {
    uint32_t* out;
    uint32_t kind;
    uint32_t blocks;

    void run(uint32_t block) const {
        const uint32_t team = MT_THREAD / kLanes;
        float values[kElements] = {float(lane())};
        uint32_t largest = 0;
        switch (kind) {
            case kTogether:
                if (team % 2) largest = team_max(MT_THREAD);  // teams need not agree
                fibers::__syncthreads();
                break;
            case kLaneLeaves:
                if (lane() != 5) largest = team_max(1);
                break;
            case kTwoLines:
                if (lane() % 2) {
                    largest = team_max(1);
                } else {
                    largest = team_max(2);
                }
                break;
            case kTwoCopies:  // of one line of block_scale
                largest = bit_cast<uint32_t>(lane() < 3 ? block_scale<E4M3>(values, false) : block_scale<E4M3>(values, false));
                break;
            case kBarrierSkipped:
                if (team != 7) fibers::__syncthreads();
                break;
            case kBarrierAndTeam:
                if (lane() == 2) fibers::__syncthreads();
                largest = team_max(1);
                break;
            case kTwoBarriers:
                if (team == 3) {
                    fibers::__syncthreads();
                } else {
                    fibers::__syncthreads();
                }
                break;
        }
        out[block * kLanes + lane()] = largest;
    }
};

MT_KERNEL(diverging, Diverging)
