// Packed weight layouts, shared by every translation unit.
//
// A matrix [out, in] is stored as panels of 8 outputs. A panel is a sequence of groups along `in`; a group holds, for
// each of its 8 outputs (the lanes), the scales and then the weights of `group` consecutive inputs. One 32-byte load
// therefore serves 8 outputs, and every output element is a plain running sum along `in`: its bits cannot depend on
// how many rows, panels or threads took part.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace foredraft {

constexpr int kLanes = 8;
constexpr int kUnit = 4;  // panels of a tile, handed to a thread together

enum Format : int {
    kF32 = 0,   // 8 inputs a group: float[8][lane]
    kBF16 = 1,  // 16 inputs: 8 words, word w of a lane = inputs 2w (low half) and 2w+1
    kQ8 = 2,    // 32 inputs: fp16 d[lane]; 8 words, bytes 0,2,1,3 of word w = inputs 4w..4w+3; weight = d*q
    kQ4 = 3,    // 32 inputs: fp16 d[lane]; 4 words of nibbles (see nibble()); weight = d*(q-8)
    kQ4M = 4,   // 32 inputs: fp16 d[lane], fp16 m[lane]; 4 words of nibbles; weight = d*q + m
    kQ4K = 5,   // 256 inputs: fp16 d[lane], fp16 dmin[lane]; then 8 x (u8 s[lane], u8 t[lane], 4 words of nibbles);
                // weight = (d*s)*q - dmin*t
    kQ6K = 6,   // 256 inputs: fp16 d[lane]; then 8 x (i8 s0[lane], i8 s1[lane], 4 words of nibbles, 2 words of crumbs);
                // weight = (d*s)*(q-32), s0 for the first 16 inputs and s1 for the last
    kFormats = 7
};

struct Layout {
    int group;    // inputs a group
    int bytes;    // bytes of a panel's group
    bool padded;  // may `in` be any number (the last group padded), or must it be a multiple of the group?
};

constexpr Layout kLayout[kFormats] = {
    {8, 256, true}, {16, 256, true}, {32, 272, false}, {32, 144, false}, {32, 160, false}, {256, 1184, false}, {256, 1680, false},
};

inline long groups(int format, long in) { return (in + kLayout[format].group - 1) / kLayout[format].group; }
inline size_t panel_bytes(int format, long in) { return static_cast<size_t>(groups(format, in)) * kLayout[format].bytes; }
inline long panels(long out) { return (out + kLanes - 1) / kLanes; }

// Where input k of a group sits. Pairs (2s, 2s+1) share a bit offset in the two 16-bit halves of a word, so that one
// shift and one mask give int16 pairs for the integer kernels.
inline int q8_byte(int k) { return 4 * (k / 4) + (k % 4 == 1 ? 2 : k % 4 == 2 ? 1 : k % 4); }
inline int nibble_word(int k) { return k / 8; }
inline int nibble_shift(int k) { return 4 * ((k % 8) / 2) + 16 * (k & 1); }
inline int crumb_word(int k) { return k / 16; }
inline int crumb_shift(int k) { return 2 * ((k % 16) / 2) + 16 * (k & 1); }

// Always inlined: its copies are compiled for different instruction sets and must never be shared by the linker.
template <class T>
inline __attribute__((always_inline)) T load(const void* p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

float half_to_float(uint16_t h);  // pack.cpp

// In byte activations the inputs of eight stand in this order, so that one mask of a word of nibbles meets four of them.
constexpr int kByteOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

enum Activations : int { kFloat = 0, kInt16 = 1, kInt8 = 2 };

// Activations of the integer kernels, with one scale for each block of 32 inputs of a row. The same block of all rows
// stands together: the rows of a tile are then at fixed distances, which instructions can name without a register.
struct Quantised {
    const void* q;            // [in/32, n, 32]: int16, or int8 in kByteOrder
    const float* scale;       // [in/32, n]
    const float* scaled_sum;  // [in/32, n]: scale * sum(q)
    const int32_t* sums;      // [in/32, n, 2]: sum(q) of the first and the last 16 inputs
    long in, n;
};

// One tile: `rows` <= 8 input rows times `count` <= 4 panels; out[row*32 + panel*8 + lane].
struct Tile {
    int rows;
    int count;
    const uint8_t* weights;
    size_t stride;  // bytes from one panel to the next
    const float* x; // first input row (float kernels)
    long ldx;
    long first_row; // first input row (integer kernels)
    long in;
};

using FloatKernel = void (*)(const Tile&, float* out);
using IntKernel = void (*)(const Tile&, const Quantised&, float* out);
// Rounds 32 * blocks numbers that follow each other; `step` blocks lie between their places.
using QuantiseKernel = void (*)(const float* x, long blocks, long step, void* q, float* scale, float* scaled_sum, int32_t* sums);

struct Kernels {
    FloatKernel linear[kFormats];
    IntKernel int16[kFormats];  // null where the format has none
    IntKernel int8[kFormats];
    QuantiseKernel quantise16;
    QuantiseKernel quantise8;
};

extern const Kernels kPortable;
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kNeon;
bool has_avx2();
bool has_avx512();  // with byte dot products
bool has_neon();    // with byte dot products

// Instruction sets. All give the same bits.
enum Isa : int { kNoVectors = 0, kIsaAvx2 = 1, kIsaAvx512 = 2, kIsaNeon = 3 };
int usable_isa(int wanted);  // `wanted` or the next best that this processor has

}  // namespace foredraft
