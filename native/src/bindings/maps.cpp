// Expert-map store and matcher over numpy arrays.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "arrays.h"
#include "bindings.h"
#include "fmoe/map_store.h"
#include "fmoe/matcher.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmoe::bindings {

namespace {

using Floats = In<float>;
using Bytes = In<std::uint8_t>;

std::vector<EntryRef> insert(MapStore& store, const Floats& probs,
                             const std::optional<Floats>& embeddings,
                             const std::optional<Bytes>& chosen,
                             const std::optional<In<std::int32_t>>& token_ids,
                             const std::vector<EntryRef>& predecessors, bool is_unit) {
    const Geometry& g = store.geometry();
    const int h = store.shape().embedding_size;
    require(probs.ndim() == 3, "probs must be [N, L, J]");
    const auto n = static_cast<int>(probs.shape(0));
    const float* all_probs = checked(probs, {n, g.num_layers, g.num_experts}, "probs");
    const float* all_embeddings = checked(embeddings, {n, h}, "embeddings");
    const std::uint8_t* all_chosen = checked(chosen, {n, g.num_layers, g.num_experts}, "chosen");
    const std::int32_t* all_tokens = checked(token_ids, {n}, "token_ids");
    require(predecessors.empty() || static_cast<int>(predecessors.size()) == n,
            "predecessors must be empty or one a map");
    std::vector<NewMap> batch(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < batch.size(); ++i) {
        const std::size_t offset = i * static_cast<std::size_t>(g.size());
        batch[i].probs = all_probs + offset;
        if (all_embeddings != nullptr)
            batch[i].embedding = all_embeddings + i * static_cast<std::size_t>(h);
        batch[i].is_unit = is_unit;
        if (all_chosen != nullptr) batch[i].chosen = all_chosen + offset;
        if (all_tokens != nullptr) batch[i].token_id = all_tokens[i];
        if (!predecessors.empty()) batch[i].predecessor = predecessors[i];
    }
    const nb::gil_scoped_release release;
    return store.insert(batch);
}

// Entries [first, first + count): half-precision bits, entry by entry.
Out<Half> read_probs(const MapStore& store, int first, int count) {
    const Geometry& g = store.geometry();
    std::vector<Half> bits(static_cast<std::size_t>(count) * g.size());
    for (int e = 0; e < g.size(); ++e) {
        const Half* column = store.columns(0) + static_cast<std::size_t>(e) * store.stride();
        for (int i = 0; i < count; ++i)
            bits[static_cast<std::size_t>(i) * g.size() + e] = column[first + i];
    }
    return to_numpy(std::move(bits),
                    {static_cast<std::size_t>(count), static_cast<std::size_t>(g.num_layers),
                     static_cast<std::size_t>(g.num_experts)});
}

Out<float> read_embeddings(const MapStore& store, int first, int count) {
    const auto h = static_cast<std::size_t>(store.shape().embedding_size);
    std::vector<float> values(static_cast<std::size_t>(count) * h);
    for (int i = 0; i < count; ++i)
        store.read_embedding(first + i, values.data() + static_cast<std::size_t>(i) * h);
    return to_numpy(std::move(values), {static_cast<std::size_t>(count), h});
}

Out<std::uint8_t> read_chosen(const MapStore& store, int first, int count) {
    const Geometry& g = store.geometry();
    std::vector<std::uint8_t> values(static_cast<std::size_t>(count) * g.size());
    for (int i = 0; i < count; ++i)
        for (int layer = 0; layer < g.num_layers; ++layer)
            store.read_chosen(
                first + i, layer,
                values.data() + static_cast<std::size_t>(i) * g.size() + g.index(layer, 0));
    return to_numpy(std::move(values),
                    {static_cast<std::size_t>(count), static_cast<std::size_t>(g.num_layers),
                     static_cast<std::size_t>(g.num_experts)});
}

void check_range(const MapStore& store, int first, int count) {
    require(first >= 0 && count >= 0 && first + count <= store.size(),
            "entries " + std::to_string(first) + " to " + std::to_string(first + count) +
                " of a store that holds " + std::to_string(store.size()));
}

template <class Read>
auto in_range(Read read) {
    return [read](const MapStore& store, int first, int count) {
        check_range(store, first, count);
        return read(store, first, count);
    };
}

void bind_store(nb::module_& m) {
    nb::class_<EntryRef>(m, "EntryRef", "An entry at a moment in time.")
        .def_ro("index", &EntryRef::index)
        .def_ro("generation", &EntryRef::generation);
    nb::class_<MapStore>(m, "MapStore", "Wrapped by fmoe_ray.maps.store.")
        .def(
            "__init__",
            [](MapStore* self, const Geometry& geometry, int capacity, int embedding_size,
               int prefetch_distance) {
                new (self) MapStore({geometry, embedding_size, prefetch_distance}, capacity);
            },
            "geometry"_a, "capacity"_a, "embedding_size"_a, "prefetch_distance"_a)
        .def_prop_ro("geometry", &MapStore::geometry)
        .def_prop_ro("capacity", &MapStore::capacity)
        .def_prop_ro("size", &MapStore::size)
        .def_prop_ro("embedding_size", [](const MapStore& s) { return s.shape().embedding_size; })
        .def_prop_ro("prefetch_distance",
                     [](const MapStore& s) { return s.shape().prefetch_distance; })
        .def_prop_ro("map_bytes", &MapStore::map_bytes)
        .def_prop_ro("embedding_bytes", &MapStore::embedding_bytes)
        .def("insert", &insert, "probs"_a, "embeddings"_a.none(), "chosen"_a.none(),
             "token_ids"_a.none(), "predecessors"_a, "is_unit"_a)
        .def("redundancy", &MapStore::redundancy, "semantic_score"_a, "map_score"_a)
        .def("link", &MapStore::link, "previous"_a, "next"_a)
        .def("is_current", &MapStore::is_current, "ref"_a)
        .def(
            "ref",
            [](const MapStore& s, int entry) {
                check_range(s, entry, 1);
                return s.ref(entry);
            },
            "entry"_a)
        .def(
            "predecessors",
            [](const MapStore& s) {
                std::vector<std::int32_t> found;
                for (int i = 0; i < s.size(); ++i) found.push_back(s.predecessor(i).index);
                return to_numpy(std::move(found), {static_cast<std::size_t>(s.size())});
            },
            "[N] index of each entry's predecessor, -1 where there is none.")
        .def("successors",
             [](const MapStore& s) {
                 std::vector<std::int32_t> found;
                 for (int i = 0; i < s.size(); ++i) found.push_back(s.successor(i).index);
                 return to_numpy(std::move(found), {static_cast<std::size_t>(s.size())});
             })
        .def(
            "generations",
            [](const MapStore& s) {
                std::vector<std::uint32_t> found;
                for (int i = 0; i < s.size(); ++i) found.push_back(s.ref(i).generation);
                return to_numpy(std::move(found), {static_cast<std::size_t>(s.size())});
            },
            "[N] moves on with every replacement of an entry.")
        .def("token_ids",
             [](const MapStore& s) {
                 std::vector<std::int32_t> found;
                 for (int i = 0; i < s.size(); ++i) found.push_back(s.token_id(i));
                 return to_numpy(std::move(found), {static_cast<std::size_t>(s.size())});
             })
        .def("read_probs", in_range(read_probs), "first"_a, "count"_a,
             "[count, L, J] bits of half-precision numbers.")
        .def("read_embeddings", in_range(read_embeddings), "first"_a, "count"_a)
        .def("read_chosen", in_range(read_chosen), "first"_a, "count"_a)
        .def(
            "semantic_scores",
            [](const MapStore& s, const Floats& embedding) {
                std::vector<float> scores(static_cast<std::size_t>(s.size()));
                s.semantic_scores(checked(embedding, {s.shape().embedding_size}, "embedding"), 1,
                                  scores.data());
                return to_numpy(std::move(scores), {static_cast<std::size_t>(s.size())});
            },
            "embedding"_a)
        .def(
            "map_scores",
            [](const MapStore& s, const Floats& probs) {
                const Geometry& g = s.geometry();
                std::vector<float> scores(static_cast<std::size_t>(s.size()));
                s.map_scores(checked(probs, {g.num_layers, g.num_experts}, "probs"), scores.data());
                return to_numpy(std::move(scores), {static_cast<std::size_t>(s.size())});
            },
            "probs"_a)
        .def("check_integrity", &MapStore::check_integrity);
}

std::vector<float> all_rows(const Matcher& matcher,
                            std::span<const float> (Matcher::*scores)(int) const) {
    std::vector<float> all;
    for (int row = 0; row < matcher.num_rows(); ++row) {
        const auto one = (matcher.*scores)(row);
        all.insert(all.end(), one.begin(), one.end());
    }
    return all;
}

template <class Question>
auto of_row(Question question) {
    return [question](const Matcher& matcher, int row) {
        require(row >= 0 && row < matcher.num_rows(),
                "row " + std::to_string(row) + " of " + std::to_string(matcher.num_rows()));
        return (matcher.*question)(row);
    };
}

Out<float> vote_of(const Matcher& matcher, const std::vector<Match>& neighbours, float sharpness,
                   bool on_chosen, int first_layer, int num_layers) {
    const Geometry& g = matcher.store().geometry();
    require(first_layer >= 0 && num_layers >= 0 && first_layer + num_layers <= g.num_layers,
            "vote: layers out of range");
    std::vector<float> p(static_cast<std::size_t>(num_layers) * g.num_experts);
    vote(matcher.store(), neighbours, sharpness, on_chosen ? Ballot::chosen : Ballot::probs,
         first_layer, num_layers, p.data());
    return to_numpy(std::move(p), {static_cast<std::size_t>(num_layers),
                                   static_cast<std::size_t>(g.num_experts)});
}

void bind_matcher(nb::module_& m) {
    nb::class_<Match>(m, "Match", "A stored map and its similarity; entry -1: nothing resembles.")
        .def_ro("entry", &Match::entry)
        .def_ro("score", &Match::score);
    nb::class_<Matcher>(m, "Matcher", "Wrapped by fmoe_ray.maps.matcher.")
        .def(nb::init<const MapStore&, int>(), "store"_a, "num_columns"_a, nb::keep_alive<1, 2>())
        .def_prop_ro("num_rows", &Matcher::num_rows)
        .def_prop_ro("num_observed", &Matcher::num_observed)
        .def(
            "start",
            [](Matcher& matcher, int num_rows, const std::optional<Floats>& embeddings) {
                const float* data = checked(
                    embeddings, {num_rows, matcher.store().shape().embedding_size}, "embeddings");
                const nb::gil_scoped_release release;
                matcher.start(num_rows, data);
            },
            "num_rows"_a, "embeddings"_a.none())
        .def(
            "observe",
            [](Matcher& matcher, int layer, const Floats& probs) {
                const float* data = checked(
                    probs, {matcher.num_rows(), matcher.store().geometry().num_experts}, "probs");
                const nb::gil_scoped_release release;
                matcher.observe(layer, data);
            },
            "layer"_a, "probs"_a)
        .def("best_semantic", of_row(&Matcher::best_semantic), "row"_a)
        .def("best_trajectory", of_row(&Matcher::best_trajectory), "row"_a)
        .def("nearest_semantic", &Matcher::nearest_semantic, "row"_a, "n"_a)
        .def("nearest_trajectory", &Matcher::nearest_trajectory, "row"_a, "n"_a)
        .def("semantic_scores",
             [](const Matcher& matcher) {
                 return to_numpy(all_rows(matcher, &Matcher::semantic_scores),
                                 {static_cast<std::size_t>(matcher.num_rows()),
                                  static_cast<std::size_t>(matcher.store().size())});
             })
        .def("trajectory_scores",
             [](const Matcher& matcher) {
                 return to_numpy(all_rows(matcher, &Matcher::trajectory_scores),
                                 {static_cast<std::size_t>(matcher.num_rows()),
                                  static_cast<std::size_t>(matcher.store().size())});
             })
        .def("vote", &vote_of, "neighbours"_a, "sharpness"_a, "on_chosen"_a, "first_layer"_a,
             "num_layers"_a);
}

}  // namespace

void bind_maps(nb::module_& m) {
    bind_store(m);
    bind_matcher(m);
}

}  // namespace fmoe::bindings
