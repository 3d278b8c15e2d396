r"""IMPALA on the steps of a fleet: one pass over each batch, corrected by V-trace.

Start a fleet in one terminal and this learner in another, both in this folder:

    headrace up --env CartPole-v1 --set learner.enabled=false \
        --until-return 475 --run-dir runs/impala
    python impala.py runs/impala

V-trace corrects for the weights that acted, however old they are. So nothing waits for fresh
steps: each batch is one update, and each update one version of the weights.

Advantages are divided by the deviation of the targets where that is above 1, and the value
loss by its square. So the learning rate means the same whatever the rewards are.

Start the learner again after a crash: it goes on with its weights, optimizer and counters.

Espeholt et al., IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures (2018), section 4.
"""

import sys

import torch

from headrace import (
    EpisodeStream,
    LearnerState,
    WeightPublisher,
    actor_critic,
    to_torch,
    vtrace,
)

MINIBATCH, LEARNING_RATE, GAMMA = 128, 0.001, 0.98
VALUE, ENTROPY, MAX_NORM = 0.5, 0.01, 0.5


def goal_of(module, episodes):
    """Return advantages and targets of all steps, by the module as it is."""
    with torch.no_grad():
        answer = module.forward_train({"obs": episodes.obs})
        dist_inputs = answer["action_dist_inputs"][episodes.step_rows]
        logp = module.logp(dist_inputs, episodes.actions)
    return vtrace(episodes, answer["values"], logp, gamma=GAMMA)


def loss_of(module, episodes, goal, some):
    """Return the loss over the steps `some`."""
    answer = module.forward_train({"obs": episodes.obs[episodes.step_rows[some]]})
    dist_inputs = answer["action_dist_inputs"]
    logp = module.logp(dist_inputs, episodes.actions[some])
    unit = goal.targets.std(correction=0).clamp(min=1.0)
    policy_loss = -(goal.advantages[some] / unit * logp).mean()
    value_loss = ((answer["values"] - goal.targets[some]) / unit).square().mean()
    return policy_loss + VALUE * value_loss - ENTROPY * module.entropy(dist_inputs).mean()


def train(module, optimizer, episodes):
    """Make one update: a pass over the steps in shuffled minibatches. Return the last loss."""
    goal = goal_of(module, episodes)
    for some in torch.randperm(len(episodes)).split(MINIBATCH):
        loss = loss_of(module, episodes, goal, some)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
    return loss.item()


def main(run_dir):
    """Train until the fleet ends."""
    torch.set_num_threads(1)  # the workers need the other cores
    state = LearnerState.of(run_dir)
    saved = state.load()  # None in the first life
    position = saved.position if saved else None
    stream = EpisodeStream.of(run_dir, auto_commit=False, position=position)
    with stream, WeightPublisher.of(run_dir) as weights:
        module = actor_critic(stream.spaces())
        optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE, eps=1e-5)
        steps, updates = 0, 0
        if saved:
            module.load_state_dict(saved.policy)
            optimizer.load_state_dict(saved.more["optimizer"])
            steps, updates = saved.steps, saved.updates
        weights.publish(module.state_dict())
        for batch in stream:
            if not batch.steps:  # it only tells of episodes that were aborted
                continue
            loss = train(module, optimizer, to_torch(batch.episodes()))
            steps, updates = steps + batch.steps, updates + 1
            more = {"optimizer": optimizer.state_dict(), "updates": updates, "steps": steps}
            state.save(stream, module.state_dict(), **more)  # before the commit
            stream.commit()
            weights.publish(module.state_dict())
            weights.log({"loss": loss})


if __name__ == "__main__":
    main(sys.argv[1])
