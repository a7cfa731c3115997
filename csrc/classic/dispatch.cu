// The steps of the ladder, in order.
#include <iterator>

#include "classic/launch.h"
#include "classic/tile.h"

namespace flash_ext::classic {

// Defined in files of their names.
int32_t three_pass(const Params& params, void* stream);
int32_t two_pass(const Params& params, void* stream);
int32_t fa1(const Params& params, void* stream);
int32_t fa1_swapped(const Params& params, void* stream);
int32_t sequence_parallel(const Params& params, void* stream);
int32_t split_rows(const Params& params, void* stream);
int32_t unnormalised(const Params& params, void* stream);
int32_t lazy_rescale(const Params& params, void* stream);
int32_t wide_rows(const Params& params, void* stream);
int32_t pipelined(const Params& params, void* stream);

namespace {

struct Workspaces {
  bool scores = false;
  bool probabilities = false;
  bool row_statistics = false;
  bool accumulator = false;
};

template <template <int> class TilesOf>
constexpr Algorithm describe(const char* name, int32_t (*launch)(const Params&, void*),
                             Workspaces kept) {
  return {name,
          launch,
          TilesOf<64>::kBlockM,
          TilesOf<64>::kBlockN,
          TilesOf<128>::kBlockN,
          kept.scores,
          kept.probabilities,
          kept.row_statistics,
          kept.accumulator};
}

template <int kHeadDim>
using NarrowTiles = Tiles<kHeadDim>;

constexpr Algorithm kAlgorithms[] = {
    describe<NarrowTiles>("three_pass", &three_pass, {true, true, true, false}),
    describe<NarrowTiles>("two_pass", &two_pass, {true, false, true, false}),
    describe<NarrowTiles>("fa1", &fa1, {false, false, true, true}),
    describe<NarrowTiles>("fa1_swapped", &fa1_swapped, {}),
    describe<NarrowTiles>("sequence_parallel", &sequence_parallel, {}),
    describe<NarrowTiles>("split_rows", &split_rows, {}),
    describe<NarrowTiles>("unnormalised", &unnormalised, {}),
    describe<NarrowTiles>("lazy_rescale", &lazy_rescale, {}),
    describe<WideTiles>("wide_rows", &wide_rows, {}),
    describe<WideTiles>("pipelined", &pipelined, {}),
};

}  // namespace

int32_t algorithm_count() { return static_cast<int32_t>(std::size(kAlgorithms)); }

const Algorithm& algorithm(int32_t index) { return kAlgorithms[index]; }

}  // namespace flash_ext::classic
