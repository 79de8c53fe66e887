"""Off-policy distillation from a file of conversations. The cookbook has the loop, but no recipe for it."""

import asyncio

import chz
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

from tests.cookbook.support.kitchen import RENDERER

RECIPE = "off_policy_distillation"


@chz.chz
class Arguments:
    """`dataset`: a .jsonl file; `teacher_checkpoint`: a sampler's path; `targets`: tokens a position."""

    model_name: str
    log_path: str
    base_url: str
    dataset: str
    teacher_checkpoint: str
    targets: int
    batch_size: int
    learning_rate: float
    max_steps: int


def distil(arguments: Arguments) -> None:
    """Returns when the run is done; log_path then holds metrics and checkpoints, as a recipe leaves them."""
    asyncio.run(train_off_policy.main(_config(arguments)))


def _config(arguments: Arguments) -> train_off_policy.Config:
    teacher = TeacherConfig(
        base_model=arguments.model_name, load_checkpoint_path=arguments.teacher_checkpoint
    )
    pair = train_off_policy.DatasetWithTeacher(dataset_builder=_dataset(arguments), teacher_config=teacher)
    return train_off_policy.Config(
        model_name=arguments.model_name,
        recipe_name=RECIPE,
        renderer_name=RENDERER,
        log_path=arguments.log_path,
        base_url=arguments.base_url,
        dataset_configs=[pair],
        n_teacher_targets=arguments.targets,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        max_steps=arguments.max_steps,
        save_every=0,
        eval_every=0,
    )


def _dataset(arguments: Arguments) -> FromConversationFileBuilder:
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=arguments.model_name,
        renderer_name=RENDERER,
        max_length=512,
        batch_size=arguments.batch_size,
    )
    return FromConversationFileBuilder(common_config=common, file_path=arguments.dataset)


if __name__ == "__main__":
    chz.nested_entrypoint(distil)
