// Keys and values of a tree's kept tokens, moved together.

#include <cstdint>
#include <cstring>
#include <initializer_list>

// In each of two rooms, of every layer and head: what lies in the slots `from`, to the slots from
// `first` on. No token moves to a later slot, so each is read before it is written over. Strides
// are in bytes; `keys` and `values` are where the row's first slot lies in the first layer.
extern "C" void move_together(char* keys, char* values, int64_t layers, int64_t layer_stride,
                              int64_t heads, int64_t head_stride, int64_t slot, int64_t first,
                              const int64_t* from, int64_t count) {
    for (int64_t layer = 0; layer < layers; layer++)
        for (int64_t head = 0; head < heads; head++)
            for (char* room : {keys, values}) {
                char* at = room + layer * layer_stride + head * head_stride;
                for (int64_t i = 0; i < count; i++)
                    if (from[i] != first + i)
                        std::memcpy(at + (first + i) * slot, at + from[i] * slot, slot);
            }
}
