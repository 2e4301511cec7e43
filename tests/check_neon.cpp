// Compares the NEON kernels with the portable ones bit by bit: every format, kind of inputs, odd shape and 1 … 11 rows.
// Built and run by test_kernels_neon.py, on ARM or under an emulator.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

extern "C" {
int fd_isa();
int fd_format(int source);
size_t fd_packed_bytes(int source, long out, long in);
void fd_pack(int source, const uint8_t* raw, long out, long in, uint8_t* packed);
void fd_linear(int format, const uint8_t* weights, long out, long in, const float* x, long ldx, long n, const float* bias,
               float* y, long ldy, int threads, int activations, int isa);
}

struct Source {
    int number;
    long block, bytes;
};

int main() {
    constexpr int kNeon = 3;
    if (fd_isa() != kNeon) return std::puts("no NEON with dot products here"), 2;
    const Source sources[] = {{0, 1, 4}, {1, 1, 2}, {2, 32, 34}, {3, 32, 18}, {4, 32, 20}, {5, 256, 144}, {6, 256, 210}, {7, 32, 22}};
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    int compared = 0;
    for (const Source& s : sources) {
        for (const long out : {1L, 17L, 40L, 64L}) {
            for (const long in : {7L, 33L, 95L, 512L}) {
                if (in % s.block) continue;
                std::vector<uint8_t> raw(out * in / s.block * s.bytes);
                if (s.block == 1) {
                    for (long i = 0; i < out * in; ++i) {
                        const float w = normal(random);
                        std::memcpy(raw.data() + i * s.bytes, reinterpret_cast<const char*>(&w) + 4 - s.bytes, s.bytes);
                    }
                } else {
                    for (uint8_t& byte : raw) byte = random() % 48;  // scales stay small halves
                }
                std::vector<uint8_t> packed(fd_packed_bytes(s.number, out, in));
                fd_pack(s.number, raw.data(), out, in, packed.data());
                for (int activations = 0; activations < 3; ++activations) {
                    for (long n = 1; n < 12; ++n) {
                        std::vector<float> x(n * in), bias(out), mine(n * out), theirs(n * out);
                        for (float& v : x) v = normal(random);
                        for (float& v : bias) v = normal(random);
                        const int format = fd_format(s.number);
                        fd_linear(format, packed.data(), out, in, x.data(), in, n, bias.data(), mine.data(), out, 1, activations, kNeon);
                        fd_linear(format, packed.data(), out, in, x.data(), in, n, bias.data(), theirs.data(), out, 1, activations, 0);
                        if (std::memcmp(mine.data(), theirs.data(), mine.size() * 4)) {
                            return std::printf("source %d, %ld x %ld, inputs %d, %ld rows differ\n", s.number, out, in, activations, n), 1;
                        }
                        ++compared;
                    }
                }
            }
        }
    }
    std::printf("%d products equal\n", compared);
}
