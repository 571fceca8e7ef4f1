"""Episodes keep support and queries apart, heads are learned on frozen features, errors are standard errors."""

import pytest
import torch

import holdfast as hf
from holdfast.analyze.volume.few_shot import few_shot, gradient_head, make_episodes, pattern_head, score


@pytest.fixture(scope="module")
def clusters():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(120) % 6
    return 4 * torch.eye(6, 8)[y] + 0.4 * torch.randn(120, 8, generator=generator), y


def test_support_and_queries_are_disjoint_and_of_the_right_classes(clusters):
    _, y = clusters
    episodes = make_episodes(y, 20, ways=4, shots=2, queries=5, seed=1)
    for episode in episodes:
        assert not set(episode.support.tolist()) & set(episode.query.tolist())
        assert len(set(episode.support.tolist())) == 8
        assert len(set(episode.query.tolist())) == 20
        of = [int(y[i]) for i in episode.support[::2]]
        assert len(set(of)) == 4
        assert y[episode.support].tolist() == [of[k] for k in episode.support_y]
        assert y[episode.query].tolist() == [of[k] for k in episode.query_y]
    assert len({tuple(e.support.tolist()) for e in episodes}) == 20
    assert torch.equal(make_episodes(y, 3, ways=4, seed=1)[2].query, make_episodes(y, 5, ways=4, seed=1)[2].query)


def test_both_heads_learn_clusters(clusters):
    features, y = clusters
    before = features.clone()
    episodes = make_episodes(y, 4, queries=10)
    for head in (gradient_head(), pattern_head(steps=40)):
        accuracy = few_shot(features, episodes, head)
        assert accuracy.shape == (4,)
        assert float(accuracy.mean()) > 0.9
    assert torch.equal(features, before)
    shuffled = features[torch.randperm(120, generator=torch.Generator().manual_seed(1))]
    assert float(few_shot(shuffled, episodes, gradient_head()).mean()) < 0.5


def test_the_length_of_a_feature_does_not_matter(clusters):
    features, y = clusters
    episodes, generator = make_episodes(y, 3, queries=10), torch.Generator().manual_seed(2)
    lengths = 100 * torch.rand(120, 1, generator=generator) + 0.01
    noisy = features + 3 * torch.randn(120, 8, generator=generator)
    found = [few_shot(given, episodes, gradient_head()) for given in (noisy, lengths * noisy)]
    assert torch.allclose(*found, atol=0.021)  # one query of fifty may be a tie
    assert 0.3 < float(found[0].mean()) < 0.9


def test_the_score_is_mean_and_standard_error():
    found = score(torch.tensor([0.5, 0.7, 0.9], dtype=torch.float64))
    assert found.accuracy == pytest.approx(0.7)
    assert found.error == pytest.approx(0.2 / 3**0.5)
    assert found.episodes == 3


def test_bad_features_and_too_few_classes_are_refused(clusters):
    features, y = clusters
    with pytest.raises(hf.InputError, match="7 ways need so many classes"):
        make_episodes(y, 1, ways=7)
    with pytest.raises(hf.InputError, match="the smallest has 20"):
        make_episodes(y, 1, queries=20)
    with pytest.raises(hf.InputError, match=r"shape \(N, D\)"):
        few_shot(features[None], make_episodes(y, 1), gradient_head())
