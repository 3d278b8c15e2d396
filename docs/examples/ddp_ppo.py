r"""PPO by several processes: torch's DistributedDataParallel over the steps of a fleet.

Start a fleet in one terminal and this learner in another, both in this folder:

    headrace up --env CartPole-v1 --set learner.enabled=false --until-return 475 \
        --run-dir runs/ddp
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 ddp_ppo.py runs/ddp

`python ddp_ppo.py runs/ddp` is the same learner in one process.

The ranks share the batches of the fleet. Each rank computes gradients over its own steps, and DDP
adds them up. Each sum is divided by the number of steps at all ranks, so an update is that of one
process with all steps, whatever each rank got.

When a rank dies, torchrun starts all again. They go on from the checkpoint of rank 0. Without the
variable, torch 2.13 may connect them to the addresses of the processes before.

Schulman et al., Proximal Policy Optimization Algorithms (2017).
"""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headrace import (
    EpisodeStream,
    LearnerState,
    WeightPublisher,
    actor_critic,
    episodes_of,
    gae,
    to_torch,
    with_own_logp,
)

BATCHES, EPOCHS, MINIBATCHES = 2, 5, 8  # of one update; a batch has 512 steps
LEARNING_RATE, GAMMA, GAE_LAMBDA = 0.001, 0.98, 0.8
CLIP, VALUE, MAX_NORM = 0.2, 1.0, 1.0


class Loss(nn.Module):
    """The sum of PPO's loss over some steps. DDP wraps it, so that its gradients are added up."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, obs, actions, behaviour_logp, advantages, targets, scale):
        answer = self.policy.forward_train({"obs": obs})
        logp = self.policy.logp(answer["action_dist_inputs"], actions)
        ratio = (logp - behaviour_logp).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        policy_loss = -torch.minimum(advantages * ratio, advantages * clipped).sum()
        return policy_loss + VALUE * (answer["values"] - targets).square().sum() / scale


def total(values):
    """Return the sums of these numbers over all ranks."""
    sums = torch.as_tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums


def moments(values):
    """Return mean and variance of these values of all ranks together."""
    values = values.double()
    count, first, second = total([len(values), values.sum(), values.square().sum()])
    mean = first / count.clamp(min=1)
    return mean, (second / count.clamp(min=1) - mean**2).clamp(min=0)


def steps_of(policy, batches):
    """Return obs, actions, log-probs of the weights that acted, advantages and targets."""
    # values of now, not of the older weights that acted
    episodes = to_torch(episodes_of([with_own_logp(policy, batch) for batch in batches]))
    obs = episodes.obs[episodes.step_rows]
    if not len(episodes):  # the batches only tell of episodes that were aborted
        return obs, episodes.actions, *torch.zeros(3, 0)
    goal = gae(episodes, gamma=GAMMA, gae_lambda=GAE_LAMBDA)
    logp = episodes.columns["behaviour_logp"]
    return obs, episodes.actions, logp, goal.advantages, goal.targets


def gradients(loss, steps, some, count, scale):
    """Leave the gradients of the mean over `count` steps, of which `some` are here."""
    own = loss(*[column[some] for column in steps], scale)
    (own * dist.get_world_size() / count).backward()  # DDP divides by the number of ranks


def train(loss, optimizer, batches):
    """Make one update of the steps of all ranks. Return their number."""
    *steps, advantages, targets = steps_of(loss.module.policy, batches)
    mean, variance = moments(advantages)
    scale = moments(targets)[1].clamp(min=1.0).float()
    steps += [((advantages - mean) / (variance.sqrt() + 1e-8)).float(), targets.float()]
    parts = torch.arange(len(targets)).tensor_split(MINIBATCHES)
    counts = total([len(part) for part in parts]).clamp(min=1.0).float()
    for _ in range(EPOCHS):  # each rank makes as many steps of the optimizer
        order = torch.randperm(len(targets)).tensor_split(MINIBATCHES)
        for some, count in zip(order, counts, strict=True):
            optimizer.zero_grad()
            gradients(loss, steps, some, count, scale)
            nn.utils.clip_grad_norm_(loss.parameters(), MAX_NORM)
            optimizer.step()
    return int(total([len(targets)]))


def main(run_dir):
    """Train until the fleet ends."""
    torch.set_num_threads(1)  # the workers need the other cores
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **({} if "RANK" in os.environ else alone))
    rank, each = dist.get_rank(), max(1, BATCHES // dist.get_world_size())
    state = LearnerState.of(run_dir)
    saved = state.load()  # None in the first life
    position = saved.position if saved else None
    stream = EpisodeStream.of(run_dir, rank="env", auto_commit=False, position=position)
    with stream, WeightPublisher.of(run_dir) if rank == 0 else nullcontext() as weights:
        policy = actor_critic(stream.spaces())
        loss = DistributedDataParallel(Loss(policy))
        optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)
        steps, updates = 0, 0
        if saved:
            policy.load_state_dict(saved.policy)
            optimizer.load_state_dict(saved.more["optimizer"])
            steps, updates = saved.steps, saved.updates
        if rank == 0:
            weights.publish(policy.state_dict())
        while batches := stream.round_of(each):  # as many batches at each rank
            steps, updates = steps + train(loss, optimizer, batches), updates + 1
            dist.barrier()  # each rank has trained on its part
            if rank == 0:
                more = {"optimizer": optimizer.state_dict(), "updates": updates}
                state.save(stream, policy.state_dict(), steps=steps, **more)
                stream.commit()  # after the checkpoint
                weights.publish(policy.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
